"""Attention mass: the positions that attention itself would weigh most, summed over a layer's heads.

An indexer is trained to match exactly this, so on any dense model it selects what an ideal indexer would. It is for
traces and for judging other selectors: its state is every key, and choosing costs what dense attention costs.
Source: the training target of DeepSeek-V3.2's indexer (DeepSeek-AI, 2025).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hisparse.layout import PAGE_RECORDS


class Ranking(NamedTuple):
    """The best positions of a selection, with their scores."""

    positions: Tensor  # int32 [b, n], best first; -1 past the end of a history
    scores: Tensor  # float32 [b, n], log2 of the probability summed over heads; -inf for pads


class AttentionMass:
    """The top-k of attention probability, for grouped-query attention.

    Args:
        top_k: positions a selection names at most.
        num_kv_heads, head_dim: of the model.
        dtype: of the keys.
        num_ranked: how many of the best positions to keep with their scores after every selection, for a trace.

    Raises:
        ValueError: a top_k below 1, or a num_ranked below it.
    """

    num_groups = 1
    can_be_recorded = False  # it looks at the lengths

    def __init__(
        self, *, top_k: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32, num_ranked: int = 0
    ) -> None:
        if top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {top_k}")
        if num_ranked and num_ranked < top_k:
            raise ValueError(f"num_ranked must be 0 or at least top_k {top_k}, got {num_ranked}")
        self.top_k = top_k
        self.num_ranked = num_ranked
        self.ranking: Ranking | None = None  # of the last selection
        self.page_shape = (PAGE_RECORDS, num_kv_heads, head_dim)
        self.dtype = dtype

    @property
    def state_bytes_per_token(self) -> float:
        """Device bytes of state a position in one layer: its keys."""
        return math.prod(self.page_shape) * self.dtype.itemsize / PAGE_RECORDS

    def append(self, state: Tensor, pages: Tensor, positions: Tensor, keys: Tensor) -> None:
        """Keep the keys. See `Selector`."""
        state[pages, positions % PAGE_RECORDS] = keys.to(self.dtype)

    def select(self, state: Tensor, page_table: Tensor, lengths: Tensor, query: Tensor) -> Tensor:
        """The positions with the largest mass; among equals, the lower one. See `Selector`."""
        mass = self._mass(state, page_table, lengths, query)  # [b, width]
        # stable, so that among equal masses the lower position wins
        mass, best = mass.sort(dim=-1, descending=True, stable=True)
        best = best.int().masked_fill(mass < 0, -1)
        if self.num_ranked:
            scores = mass.clamp(min=0).log2().masked_fill(mass < 0, -torch.inf)
            self.ranking = Ranking(_first(best, self.num_ranked, -1), _first(scores, self.num_ranked, -torch.inf))
        chosen = _first(best, self.top_k, -1)
        last = torch.iinfo(torch.int32).max
        ascending = chosen.masked_fill(chosen < 0, last).sort(dim=-1).values
        return ascending.masked_fill(ascending == last, -1)[:, None]

    def _mass(self, state: Tensor, page_table: Tensor, lengths: Tensor, query: Tensor) -> Tensor:
        """Probability summed over heads, float32 [b, width]; -1 past the end of a history."""
        num_kv_heads, head_dim = self.page_shape[1:]
        width = int(lengths.max())
        table = page_table[:, : -(-width // PAGE_RECORDS)].clamp(min=0).long()
        keys = state[table].flatten(1, 2)[:, :width].float()  # [b, width, num_kv_heads, head_dim]
        past = torch.arange(width, device=lengths.device) >= lengths[:, None]
        keys = keys.masked_fill(past[:, :, None, None], 0.0)
        grouped = query.float().reshape(len(query), num_kv_heads, -1, head_dim) * head_dim**-0.5
        scores = grouped @ keys.permute(0, 2, 3, 1)  # [b, num_kv_heads, heads each, width]
        weights = scores.masked_fill(past[:, None, None], -torch.inf).softmax(dim=-1)
        mass: Tensor = weights.sum(dim=(1, 2))
        return mass.masked_fill(past, -1.0)


def _first(values: Tensor, count: int, pad: float) -> Tensor:
    """The first `count` of each line, [b, count], padded at the end."""
    values = values[:, :count]
    return torch.nn.functional.pad(values, (0, count - values.shape[1]), value=pad)
