"""The lightning indexer's scores and top-k on the GPU: what `dsa.py` specifies, by kernels that read only live keys.

Nothing is read back, so a selection can be made while a step is recorded in a CUDA graph. Scores that are not finite
are counted on the device; whoever runs the step asks for the count when it is over.
"""

import torch
from torch import Tensor

from hisparse.errors import ModelOutputError
from hisparse.kernels.index_scores import index_scores, supports
from hisparse.kernels.top_k import top_k

NOT_FINITE = "the indexer's scores are NaN or infinite: the checkpoint is damaged, or its dtype overflows (try float32)"


class KernelIndexer:
    """Selects with kernels.

    Args:
        top_k: positions that a selection names at most.
        fp8: how keys stand in the state.
    """

    def __init__(self, top_k: int, *, fp8: bool) -> None:
        self.top_k, self.fp8 = top_k, fp8
        self._failures: Tensor | None = None  # int32 [], of the device that selects

    def takes(self, num_heads: int, head_dim: int, state_dtype: torch.dtype, dtype: torch.dtype) -> bool:
        """Whether there are kernels for such queries over keys in such a state."""
        return (self.fp8 or state_dtype == dtype) and supports(num_heads, head_dim, dtype, fp8=self.fp8)

    def scores(self, state: Tensor, page_table: Tensor, lengths: Tensor, query: Tensor, weights: Tensor) -> Tensor:
        """Of every position, float32 [b, p * 64]; anything past a length. See `DSA.select`."""
        table = page_table.int().contiguous()
        return index_scores(state, table, lengths, query.contiguous(), weights.contiguous(), fp8=self.fp8)

    def best(self, scores: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """The best of these scores: positions int32 [b, top_k], and the k-th scores. See `DSA.select`."""
        if self._failures is None:
            if torch.cuda.is_current_stream_capturing():
                raise ValueError("select once before it is recorded in a CUDA graph: kernels and a counter come first")
            self._failures = torch.zeros((), dtype=torch.int32, device=scores.device)
        return top_k(scores, lengths, self.top_k, self._failures)

    @property
    def failures(self) -> Tensor | None:
        """How many selections since the last `check` met scores that are not finite, int32 []; None: none was made."""
        return self._failures

    def check(self, num_failures: int | None = None) -> None:
        """Raise `ModelOutputError` if there were failures; unless it is told how many, it waits for the device."""
        if self._failures is None:
            return
        if self._failures.item() if num_failures is None else num_failures:
            self._failures.zero_()
            raise ModelOutputError(NOT_FINITE)
