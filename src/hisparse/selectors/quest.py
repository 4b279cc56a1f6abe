"""Quest: pages of 16 tokens, ranked by an upper bound of the attention score that any of their keys can have.

Its state is, for each page and KV head, the largest and the smallest value of every key element. A query's
score with a page is the sum over elements of the larger of q * max and q * min, which no key of the page can
exceed. Training-free, so it works on any dense model. Source: Quest (arXiv 2406.10774).
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from hisparse.layout import PAGE_RECORDS
from hisparse.ranking import Ranking
from hisparse.selectors.selector import Selected

QUEST_PAGE = 16  # tokens
PAGES_EACH = PAGE_RECORDS // QUEST_PAGE  # Quest pages in a page of selection state
BLOCK = 512  # Quest pages that are scored at a time on a GPU


def _softmax_sum(scores: Tensor) -> Tensor:
    return scores.softmax(dim=-1).sum(dim=2)


def _softmax_max(scores: Tensor) -> Tensor:
    return scores.softmax(dim=-1).amax(dim=2)


def _best_rank(scores: Tensor) -> Tensor:
    """Every head's first choice comes before any head's second choice."""
    ranks = scores.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return -ranks.amin(dim=2).float()


# How the heads that share a selection agree on a page: [b, groups, heads, pages] scores, already scaled as
# attention scales them, -inf where there is no page -> [b, groups, pages].
AGGREGATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda scores: scores.amax(dim=2),
    "mean": lambda scores: scores.mean(dim=2),
    "softmax_sum": _softmax_sum,
    "softmax_max": _softmax_max,
    "best_rank": _best_rank,
}


class Quest:
    """The Quest selector for grouped-query attention.

    Args:
        top_k: tokens a selection names at most, at least one page of 16; only whole pages count.
        num_kv_heads, head_dim: of the model.
        dtype: of keys and state.
        aggregation: how heads that share a selection agree; one of `AGGREGATIONS`. The default won the
            sweep in LOG.md.
        per_kv_head: a selection for each KV head instead of one a layer.

    Raises:
        ValueError: a top_k below one page, or an aggregation that does not exist.
    """

    can_be_recorded = True

    def __init__(
        self,
        *,
        top_k: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        aggregation: str = "max",
        per_kv_head: bool = False,
    ) -> None:
        if top_k < QUEST_PAGE:
            raise ValueError(f"top_k must be at least {QUEST_PAGE}, one page of the Quest selector, got {top_k}")
        if aggregation not in AGGREGATIONS:
            raise ValueError(f"aggregation must be one of {', '.join(AGGREGATIONS)}, got {aggregation!r}")
        self.top_k = top_k // QUEST_PAGE * QUEST_PAGE
        self.num_groups = num_kv_heads if per_kv_head else 1
        self.page_shape = (PAGES_EACH, num_kv_heads, 2, head_dim)  # largest, then smallest
        self.dtype = dtype
        self._aggregate = AGGREGATIONS[aggregation]

    @property
    def state_bytes_per_token(self) -> float:
        """Device bytes of state a position in one layer."""
        return math.prod(self.page_shape) * self.dtype.itemsize / PAGE_RECORDS

    def append(self, state: Tensor, pages: Tensor, positions: Tensor, keys: Tensor) -> None:
        """Widen the bounds of each key's page; the first key of a page starts them. See `Selector`."""
        bounds = state.view(-1, *self.page_shape[1:])  # [Quest pages, num_kv_heads, 2, head_dim]
        page = pages * PAGES_EACH + positions % PAGE_RECORDS // QUEST_PAGE
        first = (positions % QUEST_PAGE == 0).to(torch.int32)
        begins = torch.zeros(len(bounds), dtype=torch.int32, device=page.device).scatter_reduce_(0, page, first, "amax")
        is_new = begins[page, None, None] > 0  # the same for all of a page's keys
        index = page[:, None, None].expand_as(keys)
        for side, nothing, reduce in ((0, -torch.inf, "amax"), (1, torch.inf, "amin")):
            bound = bounds.select(2, side)
            bound[page] = bound[page].masked_fill(is_new, nothing)
            bound.scatter_reduce_(0, index, keys.to(self.dtype), reduce)

    def select(self, state: Tensor, page_table: Tensor, lengths: Tensor, query: Tensor) -> Selected:
        """The best-scored pages, the newest always first among them. See `Selector`."""
        num_pages = -(-lengths // QUEST_PAGE)  # [b], Quest pages of each request
        # On a GPU nothing is read back; there scores are computed block by block, which the width does not change.
        width = page_table.shape[1] * PAGES_EACH if lengths.is_cuda else int(num_pages.max())
        page = torch.arange(width, device=lengths.device)
        scores = self._aggregate(self._scores(state, page_table, query, page >= num_pages[:, None]))
        scores = scores.masked_fill((page >= num_pages[:, None])[:, None], -torch.inf)
        scores = scores.masked_fill((page == num_pages[:, None] - 1)[:, None], torch.inf)
        # stable, so that among equal scores the lower page wins
        scores, pages = scores.sort(dim=-1, descending=True, stable=True)
        chosen = pages[..., : self.top_k // QUEST_PAGE].sort(dim=-1).values
        positions = _pad(_positions_of(chosen, lengths), self.top_k, -1)
        return Selected(positions, partial(_best_of, pages, scores, lengths))

    def _scores(self, state: Tensor, page_table: Tensor, query: Tensor, absent: Tensor) -> Tensor:
        """Upper bounds [b, groups, heads of a group, width], -inf where `absent` [b, width]."""
        batch, width = absent.shape
        num_kv_heads, head_dim = self.page_shape[1], self.page_shape[3]
        table = page_table[:, : -(-width // PAGES_EACH)].clamp(min=0).long()
        bounds = state[table].flatten(1, 2)[:, :width]  # [b, width, num_kv_heads, 2, head_dim]
        grouped = query.float().reshape(batch, num_kv_heads, -1, head_dim)
        signed = torch.cat((grouped.clamp(min=0), grouped.clamp(max=0)), dim=-1)  # [b, kv, heads, 2 * head_dim]
        scores = _blockwise(signed, bounds.float().flatten(3))  # [b, kv, heads, width]
        scale: float = head_dim**-0.5
        scores = (scores * scale).masked_fill(absent[:, None, None], -torch.inf)
        return scores.reshape(batch, self.num_groups, -1, width)


def _best_of(pages: Tensor, scores: Tensor, lengths: Tensor, count: int) -> Ranking:
    """The first positions of ranked Quest pages [b, groups, pages]; a page's share its score, the lower one first."""
    num_pages = -(-count // QUEST_PAGE) + 1  # the newest page may be short, and its pads go last
    positions = _positions_of(pages[..., :num_pages], lengths)
    each = scores[..., :num_pages].repeat_interleave(QUEST_PAGE, dim=-1).masked_fill(positions < 0, -torch.inf)
    pads_last = (positions < 0).int().sort(dim=-1, stable=True).indices[..., :count]
    return Ranking(
        _pad(positions.gather(-1, pads_last), count, -1), _pad(each.gather(-1, pads_last), count, -torch.inf)
    )


def _positions_of(pages: Tensor, lengths: Tensor) -> Tensor:
    """Positions of Quest pages [b, groups, m], int32 [b, groups, 16 m]; -1 past the end of a history."""
    offset = torch.arange(QUEST_PAGE, device=pages.device)
    positions = (pages[..., None] * QUEST_PAGE + offset).flatten(-2).int()
    return positions.masked_fill(positions >= lengths[:, None, None], -1)


def _pad(values: Tensor, count: int, pad: float) -> Tensor:
    return torch.nn.functional.pad(values, (0, count - values.shape[-1]), value=pad)


def _blockwise(query: Tensor, bounds: Tensor) -> Tensor:
    """Products of [b, kv, heads, d] with [b, width, kv, d], [b, kv, heads, width].

    On a GPU in blocks of one shape: how many pages there are besides would change how a product is rounded.
    """
    keys = bounds.permute(0, 2, 3, 1)
    if not query.is_cuda:
        return query @ keys
    padded = torch.nn.functional.pad(keys, (0, -keys.shape[-1] % BLOCK))
    scores: Tensor = torch.cat([query @ block.contiguous() for block in padded.split(BLOCK, dim=-1)], dim=-1)
    return scores[..., : keys.shape[-1]]
