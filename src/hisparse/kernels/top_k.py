"""Choose the best-scored positions on the GPU: cuda/top_k.cu. `selectors/dsa.py` specifies it."""

import torch
from torch import Tensor

from hisparse.kernels.checks import check_length, check_requests, check_tensor
from hisparse.kernels.launch import Kernel, launch, load
from hisparse.kernels.params import TopKParams
from hisparse.kernels.registration import register

THREADS = 1024
BINS = 4096
POSITIONS_A_BLOCK = 4096  # at least, if there are blocks enough
BLOCKS_A_MULTIPROCESSOR = 2
WORD = 32


def top_k(scores: Tensor, lengths: Tensor, k: int, failures: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The k best positions of each history. Nothing is read back, so it can be captured.

    Args:
        scores: float32 [b, n], n a multiple of 32; those past a length are not read. NaN ranks above all numbers.
        lengths: int64 [b], at most n.
        k: how many.
        failures: int32 [], goes up for a history longer than k with scores that are not finite.

    Returns:
        int32 [b, k] positions, ascending, of equal scores the lower ones, -1 past the end of a shorter history; and
        float32 [b], the k-th score, -inf for a history of at most k positions.

    Raises:
        ValueError: an argument of another dtype, shape or device.
        BuildError: the kernel cannot be compiled or launched here.
    """
    check_tensor(scores, "scores", torch.float32, scores, 2)
    check_tensor(lengths, "lengths", torch.int64, scores, 1)
    check_length(lengths, "lengths", scores.shape[0])
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    check_requests(scores.shape[0])
    if scores.shape[1] % WORD:
        raise ValueError(f"scores must have lines of a multiple of {WORD}, got {list(scores.shape)}")
    if failures is not None:
        check_tensor(failures, "failures", torch.int32, scores, 0)
    positions = torch.empty(scores.shape[0], k, dtype=torch.int32, device=scores.device)
    kth = torch.empty(scores.shape[0], device=scores.device)
    torch.ops.hisparse.top_k(scores, lengths, positions, kth, failures)
    return positions, kth


def load_top_k(device: torch.device) -> tuple[Kernel, Kernel]:
    """The kernel that counts, and the one that selects."""
    first, second = (load("top_k.cu", name, TopKParams, device) for name in ("count_scores", "top_k"))
    return first, second


def _launch(scores: Tensor, lengths: Tensor, positions: Tensor, kth: Tensor, failures: Tensor | None) -> None:
    (batch, k), longest = positions.shape, scores.shape[1]
    if not batch:
        return
    count, select = load_top_k(scores.device)
    counts = torch.zeros(batch, BINS + 2, dtype=torch.int32, device=scores.device)
    marked = torch.empty(2, batch, longest // WORD, dtype=torch.int32, device=scores.device)
    listed = torch.empty(batch, longest, dtype=torch.int64, device=scores.device)
    params = TopKParams(
        scores=scores.data_ptr(),
        lengths=lengths.data_ptr(),
        positions=positions.data_ptr(),
        kth=kth.data_ptr(),
        counts=counts.data_ptr(),
        marked=marked.data_ptr(),
        listed=listed.data_ptr(),
        failures=None if failures is None else failures.data_ptr(),
        score_stride=longest,
        k=k,
        batch=batch,
    )
    room = -(-count.multiprocessors * BLOCKS_A_MULTIPROCESSOR // batch)
    blocks = max(min(room, -(-longest // POSITIONS_A_BLOCK)), 1)
    launch(count, params, (blocks, batch), THREADS, overlaps=True)
    launch(select, params, (blocks, batch), THREADS, overlaps=True)


register(
    "top_k(Tensor scores, Tensor lengths, Tensor(a!) positions, Tensor(b!) kth, Tensor(c!)? failures)",
    _launch,
)
