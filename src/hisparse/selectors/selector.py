"""The interface between a selector and whoever runs it.

A selector owns no memory: its state stands in pages of 64 positions that the cache admits, saves and
releases with the request (selection_state.py), or in a plain tensor in a resident run. `append` writes keys
into it as they are made, `select` reads it and names positions.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hisparse.ranking import Best


class Selected(NamedTuple):
    """A selection, and what it was chosen from."""

    positions: Tensor  # int32 [b, num_groups, top_k]: distinct positions in ascending order, then -1 pads
    best: Best  # [b, num_groups, n]


class Selector(Protocol):
    """Chooses the positions that a layer reads."""

    top_k: int  # the most positions, in tokens, that a selection names
    num_groups: int  # selections a layer: 1, or one for each KV head
    can_be_recorded: bool  # on a GPU neither method waits for the device, for one position of each request

    @property
    def page_shape(self) -> tuple[int, ...]:
        """Shape of one page's state (64 positions) in one layer."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the state."""

    @property
    def state_bytes_per_token(self) -> float:
        """Device bytes of state a position in one layer."""

    def append(self, state: Tensor, pages: Tensor, positions: Tensor, keys: Tensor) -> None:
        """Take in new keys.

        Args:
            state: [num_pages, *page_shape], one layer's pages.
            pages: [n] int64, the page that each position's state is in.
            positions: [n] int64; a request's positions come in ascending order, each once.
            keys: [n, num_kv_heads, head_dim], as attention reads them (after rope).
        """

    def select(self, state: Tensor, page_table: Tensor, lengths: Tensor, query: Tensor) -> Selected:
        """Choose positions for one query a request.

        Args:
            state: [num_pages, *page_shape], one layer's pages.
            page_table: [b, p] integer, pages of each request in order, -1 past its last.
            lengths: [b] int64, positions in each history; the newest one is lengths - 1.
            query: [b, num_heads, head_dim], as attention reads it.
        """
