"""DSA: a learned indexer scores every position of the history, and the best-scored are read.

The lightning indexer has a few small heads and one key a position. Its score is
    sum over heads of weight * relu(query . key),
in float32. The model makes queries and keys (after norm and rope) and weights (all constants folded in); this
selector keeps the keys and ranks the positions: here in torch, which is the reference, or by kernels on a GPU
(kernel_indexer.py).
Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.

Keys are gathered into blocks of one shape before they are multiplied. So neither the pages that they lie in, nor the
length of the history, nor the other requests of a batch can change how a score is rounded.
"""

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hisparse.errors import ModelOutputError
from hisparse.layout import PAGE_RECORDS, num_pages_for
from hisparse.ranking import Best, Ranking
from hisparse.selectors.index_keys import Fp8Keys, KeyFormat, PlainKeys
from hisparse.selectors.kernel_indexer import NOT_FINITE, KernelIndexer

BLOCK = 1024  # positions whose scores are computed at a time
QUERIES = 64  # queries of a chunk that are scored at a time: memory stays bounded for any chunk and history


class Indexed(NamedTuple):
    """A decode step's selection, what it was chosen from, and the score that it took to get in."""

    positions: Tensor  # int32 [b, top_k], ascending, then -1 pads
    best: Best  # [b, n]
    kth_score: Tensor  # float32 [b], the lowest selected score; -inf where the whole history is selected


class DSA:
    """The selector of DeepSeek sparse attention.

    Args:
        top_k: positions that a selection names at most.
        head_dim: elements of an index key. There are GPU kernels for up to 128.
        dtype: of keys in the state, unless `fp8`.
        fp8: keep keys in float8 e4m3 with one float32 scale each: 132 bytes a position for a head_dim of 128.

    Raises:
        ValueError: a size below one, or a head_dim above 128 with `fp8`.
    """

    num_groups = 1

    def __init__(self, *, top_k: int, head_dim: int, dtype: torch.dtype = torch.bfloat16, fp8: bool = False) -> None:
        for name, value in (("top_k", top_k), ("head_dim", head_dim)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.top_k = top_k
        self.head_dim = head_dim
        self._format: KeyFormat = Fp8Keys(head_dim) if fp8 else PlainKeys(head_dim, dtype)
        self._kernels = KernelIndexer(top_k, fp8=fp8)

    @property
    def page_shape(self) -> tuple[int, ...]:
        """Shape of one page's state (64 positions) in one layer."""
        return self._format.page_shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the state."""
        return self._format.dtype

    @property
    def state_bytes_per_token(self) -> float:
        """Device bytes of state a position in one layer."""
        return math.prod(self.page_shape) * self.dtype.itemsize / PAGE_RECORDS

    def has_kernels_for(self, num_heads: int, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether `select` is made by kernels for queries of so many heads; it can be recorded in a CUDA graph then."""
        return device.type == "cuda" and self._kernels.takes(num_heads, self.head_dim, self.dtype, dtype)

    def append(self, state: Tensor, pages: Tensor, positions: Tensor, keys: Tensor) -> None:
        """Keep the keys of new positions.

        Args:
            state: [num_pages, *page_shape], one layer's pages.
            pages: [n] int64, the page that each position's state is in.
            positions: [n] int64, each once.
            keys: [n, head_dim], after norm and rope.
        """
        self._format.write(state, pages, positions % PAGE_RECORDS, keys)

    def select(self, state: Tensor, page_table: Tensor, lengths: Tensor, query: Tensor, weights: Tensor) -> Indexed:
        """The best-scored positions of each request. Of equal scores the lower position wins.

        Args:
            state: [num_pages, *page_shape], one layer's pages.
            page_table: [b, p] integer, pages of each request in order; entries past its last are not read.
            lengths: [b] int64, positions in each history; the newest one is lengths - 1.
            query: [b, index_heads, head_dim], after rope.
            weights: [b, index_heads] float32, every constant folded in; may be negative.
        """
        self._check(query, weights)
        if self._has_kernels(query):
            scores = self._kernels.scores(state, page_table, lengths, query, weights)
            positions, kth_score = self._kernels.best(scores, lengths)
            return Indexed(positions, partial(_ranked, scores, lengths), kth_score)
        positions = torch.full((len(lengths), self.top_k), -1, dtype=torch.int32, device=query.device)
        kth_score = torch.full((len(lengths),), -torch.inf, device=query.device)
        for i, length in enumerate(lengths.tolist()):
            if length <= self.top_k:
                positions[i, :length] = torch.arange(length, device=query.device)
                continue
            scores = score_keys(self._read(state, page_table[i], length), query[i : i + 1], weights[i : i + 1])
            _check_scores(scores[:, :length])
            best, kth_score[i : i + 1] = best_scored(scores[:, :length], self.top_k)
            positions[i] = best[0].nonzero()[:, 0]
        return Indexed(positions, partial(self._rank, state, page_table, lengths, query, weights), kth_score)

    def select_causal(
        self, state: Tensor, pages: Tensor, positions: Tensor, query: Tensor, weights: Tensor
    ) -> Tensor | None:
        """For each query of a prefill chunk, the best-scored positions up to its own.

        Args:
            state: [num_pages, *page_shape], one layer's pages; the chunk's keys are in it already.
            pages: [p] integer, the request's pages in order.
            positions: [n] int64, ascending.
            query: [n, index_heads, head_dim], after rope.
            weights: [n, index_heads] float32.

        Returns:
            bool [n, T], T = positions[-1] + 1; or None, if each query reads all positions up to its own.
        """
        self._check(query, weights)
        length = int(positions[-1]) + 1
        if length <= self.top_k:
            return None
        if self._has_kernels(query):
            return self._select_causal(state, pages, positions, query, weights)
        keys = self._read(state, pages, length)
        column = torch.arange(length, device=query.device)
        pieces = []
        for own, q, w in zip(*(x.split(QUERIES) for x in (positions, query, weights)), strict=True):
            later = column > own[:, None]
            scores = score_keys(keys, q, w)[:, :length]
            _check_scores(scores)
            pieces.append(best_scored(scores.masked_fill_(later, -torch.inf), self.top_k)[0] & ~later)
        return torch.cat(pieces)

    def scores_of(self, state: Tensor, page_table: Tensor, query: Tensor, weights: Tensor, positions: Tensor) -> Tensor:
        """The scores of chosen positions, as `select` computes them, bit for bit.

        Args:
            state, page_table, query, weights: as for `select`.
            positions: [b, m] integer, -1 pads, in any order; each lies in its request's history.

        Returns:
            float32 [b, m]; -inf at pads.
        """
        self._check(query, weights)
        if self._has_kernels(query):
            scores = self._kernels.scores(state, page_table, positions.amax(dim=-1).long() + 1, query, weights)
            return scores.gather(1, positions.clamp(min=0).long()).masked_fill_(positions < 0, -torch.inf)
        chosen = torch.full(positions.shape, -torch.inf, device=query.device)
        for i, length in enumerate((positions.amax(dim=-1) + 1).tolist()):
            if length:
                scores = score_keys(self._read(state, page_table[i], length), query[i : i + 1], weights[i : i + 1])[0]
                used = positions[i] >= 0
                chosen[i, used] = scores[positions[i, used].long()]
        return chosen

    @property
    def failures(self) -> Tensor | None:
        """Selections on a GPU since the last check whose scores are not finite, int32 []; None: none was made."""
        return self._kernels.failures

    def check_finite(self, num_failures: int | None = None) -> None:
        """Raise `ModelOutputError` if a selection on a GPU met scores that are not finite.

        Waits for those made so far, unless the caller has read `failures` itself. Elsewhere such a selection raises at
        once.
        """
        self._kernels.check(num_failures)

    def _select_causal(self, state: Tensor, pages: Tensor, positions: Tensor, query: Tensor, weights: Tensor) -> Tensor:
        """`select_causal` by kernels: each query is a request of its own over the same pages."""
        length = int(positions[-1]) + 1
        mask = torch.zeros(len(positions), length + 1, dtype=torch.bool, device=query.device)
        rows = zip(*(x.split(QUERIES) for x in (mask, positions, query, weights)), strict=True)
        for chosen, own, q, w in rows:
            table = pages[: num_pages_for(length)].expand(len(own), -1)
            selected, _ = self._kernels.best(self._kernels.scores(state, table, own + 1, q, w), own + 1)
            chosen.scatter_(1, selected.long() % (length + 1), True)  # a pad marks the column past the last
        return mask[:, :length]

    def _rank(
        self, state: Tensor, page_table: Tensor, lengths: Tensor, query: Tensor, weights: Tensor, count: int
    ) -> Ranking:
        """The best positions, from scores computed again: `select` has none of a history that it reads whole."""
        scores = torch.full((len(lengths), int(lengths.max())), -torch.inf, device=query.device)
        for i, length in enumerate(lengths.tolist()):
            if length:
                keys = self._read(state, page_table[i], length)
                scores[i, :length] = score_keys(keys, query[i : i + 1], weights[i : i + 1])[0, :length]
        return _ranked(scores, lengths, count)

    def _has_kernels(self, query: Tensor) -> bool:
        return self.has_kernels_for(query.shape[-2], query.dtype, query.device)

    def _check(self, query: Tensor, weights: Tensor) -> None:
        if query.shape[-1] != self.head_dim or query.shape[:-1] != weights.shape:
            raise ValueError(
                f"expected queries [t, index_heads, {self.head_dim}] and weights [t, index_heads], "
                f"got {list(query.shape)} and {list(weights.shape)}"
            )

    def _read(self, state: Tensor, pages: Tensor, length: int) -> Tensor:
        """Keys of positions 0 to length - 1 and zeros up to a whole block, float32 [m * BLOCK, head_dim].

        Pages past the last position are not read; a missing one before it is an `IndexError`.
        """
        live = pages[: num_pages_for(length)].long()
        keys = torch.zeros(-(-length // BLOCK) * BLOCK, self.head_dim, device=state.device)
        keys[:length] = self._format.read(state, live)[:length]
        return keys


def score_keys(keys: Tensor, query: Tensor, weights: Tensor) -> Tensor:
    """Scores of queries with all keys.

    Args:
        keys: float32 [m * BLOCK, head_dim].
        query: [n, index_heads, head_dim]; memory grows with n * index_heads * BLOCK.
        weights: [n, index_heads] float32.

    Returns:
        float32 [n, m * BLOCK].
    """
    num_queries, num_heads, _ = query.shape
    rows = query.to(torch.float32, copy=True).flatten(0, 1)  # a copy: rounding may depend on how a view is aligned
    head_weights = weights.to(torch.float32, copy=True)[:, None]  # [n, 1, index_heads]
    blocks = []
    for block in keys.split(BLOCK):
        each_head = (rows @ block.T).clamp_(min=0).view(num_queries, num_heads, BLOCK)
        blocks.append(torch.bmm(head_weights, each_head)[:, 0])
    return torch.cat(blocks, dim=-1)


def _ranked(scores: Tensor, lengths: Tensor, count: int) -> Ranking:
    """The `count` best of each line's first `lengths` scores; float32 [b, width], anything past a length."""
    past = torch.arange(scores.shape[1], device=scores.device) >= lengths[:, None]
    values, positions = scores.masked_fill(past, -torch.inf).topk(min(count, scores.shape[1]), dim=-1)
    padding = (0, count - values.shape[1])
    values = torch.nn.functional.pad(values, padding, value=-torch.inf)
    positions = torch.nn.functional.pad(positions.int(), padding, value=-1)
    return Ranking(positions.masked_fill(values == -torch.inf, -1), values)


def _check_scores(scores: Tensor) -> None:
    """NaN has no rank, and infinities have none among each other: what they select would be arbitrary, or nothing."""
    if not scores.isfinite().all():
        raise ModelOutputError(NOT_FINITE)


def best_scored(scores: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Where the top_k best of each row are, the lower position first among equals, and the k-th score.

    Args:
        scores: float32 [n, T], T >= top_k.
        top_k: how many.

    Returns:
        bool [n, T] with top_k entries true in each row, and float32 [n].
    """
    kth = scores.topk(top_k, dim=-1, sorted=False).values.amin(dim=-1, keepdim=True)
    above, ties = scores > kth, scores == kth
    room = top_k - above.sum(dim=-1, keepdim=True)
    best = above | (ties & (ties.cumsum(dim=-1, dtype=torch.int32) <= room))
    return best, kth[:, 0]
