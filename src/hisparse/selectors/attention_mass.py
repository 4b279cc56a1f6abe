"""Attention mass: the positions that attention itself would weigh most, summed over a layer's heads.

An indexer is trained to match exactly this, so on any dense model it selects what an ideal indexer would. It is for
traces and for judging other selectors: its state is every key, and choosing costs what dense attention costs.
Source: the training target of DeepSeek-V3.2's indexer (DeepSeek-AI, 2025).
"""

import math
from functools import partial

import torch
from torch import Tensor

from hisparse.layout import PAGE_RECORDS
from hisparse.ranking import Ranking
from hisparse.selectors.selector import Selected


class AttentionMass:
    """The top-k of attention probability, for grouped-query attention.

    Args:
        top_k: positions a selection names at most.
        num_kv_heads, head_dim: of the model.
        dtype: of the keys.

    Raises:
        ValueError: a top_k below 1.
    """

    num_groups = 1
    can_be_recorded = False  # it looks at the lengths

    def __init__(self, *, top_k: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32) -> None:
        if top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {top_k}")
        self.top_k = top_k
        self.page_shape = (PAGE_RECORDS, num_kv_heads, head_dim)
        self.dtype = dtype

    @property
    def state_bytes_per_token(self) -> float:
        """Device bytes of state a position in one layer: its keys."""
        return math.prod(self.page_shape) * self.dtype.itemsize / PAGE_RECORDS

    def append(self, state: Tensor, pages: Tensor, positions: Tensor, keys: Tensor) -> None:
        """Keep the keys. See `Selector`."""
        state[pages, positions % PAGE_RECORDS] = keys.to(self.dtype)

    def select(self, state: Tensor, page_table: Tensor, lengths: Tensor, query: Tensor) -> Selected:
        """The positions with the largest mass; among equals, the lower one. See `Selector`."""
        mass = self._mass(state, page_table, lengths, query)  # [b, width]
        # stable, so that among equal masses the lower position wins
        mass, best = mass.sort(dim=-1, descending=True, stable=True)
        best = best.int().masked_fill(mass < 0, -1)
        chosen = _first(best, self.top_k, -1)
        last = torch.iinfo(torch.int32).max
        ascending = chosen.masked_fill(chosen < 0, last).sort(dim=-1).values
        return Selected(ascending.masked_fill(ascending == last, -1)[:, None], partial(_best_of, best, mass))

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


def _best_of(best: Tensor, mass: Tensor, count: int) -> Ranking:
    """The first of ranked positions [b, width]. Scores are log2 of their mass."""
    scores = mass.clamp(min=0).log2().masked_fill(mass < 0, -torch.inf)
    return Ranking(_first(best, count, -1)[:, None], _first(scores, count, -torch.inf)[:, None])


def _first(values: Tensor, count: int, pad: float) -> Tensor:
    """The first `count` of each line, [b, count], padded at the end."""
    values = values[:, :count]
    return torch.nn.functional.pad(values, (0, count - values.shape[1]), value=pad)
