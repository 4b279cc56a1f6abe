"""Grouped-query attention over resident records, read by position.

Shares the selector and the attention arithmetic with grouped.py, and nothing of the cache.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hisparse.attention import GroupedRecords, attend, attend_tiled
from hisparse.engine.family import Resident, end_to_end, lengths_of, side_by_side
from hisparse.layout import PAGE_RECORDS, TILE_RECORDS
from hisparse.selectors import Selector


class ResidentChunk:
    """Attention of one request's chunk."""

    def __init__(self, selector: Selector, records: GroupedRecords, resident: Resident, positions: Tensor) -> None:
        self._selector, self._records, self._resident = selector, records, resident
        self._positions = positions  # [n] int64
        self._start = int(positions[0])

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `hisparse.models.Attend`."""
        state = self._resident.state[layer]
        self._selector.append(state, self._positions // PAGE_RECORDS, self._positions, key)
        groups = self._selector.num_groups
        pieces = zip(*(heads.chunk(groups, dim=1) for heads in (query, key, value)), strict=True)
        outs = [self._attend_group(layer * groups + group, *piece) for group, piece in enumerate(pieces)]
        return torch.cat(outs, dim=1)

    def _attend_group(self, cache_layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        store = self._resident.records[cache_layer]
        own = self._records.pack(key, value)
        store[self._positions] = own
        earlier = store[: self._start].split(TILE_RECORDS) if self._start else ()
        return attend_tiled(query, earlier, own, self._records)


class ResidentStep:
    """Attention of one token of each of several requests."""

    def __init__(
        self, selector: Selector, records: GroupedRecords, residents: Sequence[Resident], positions: Tensor
    ) -> None:
        self._selector, self._records, self._residents = selector, records, residents
        self._positions, self._lengths = positions, lengths_of(residents, positions)  # [b] int64
        self._live = [(i, p) for i, p in enumerate(positions.tolist()) if not residents[i].is_padding]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `hisparse.models.Attend`."""
        selection = self._select(layer, query, key)  # [b, groups, k]
        groups = self._selector.num_groups
        pieces = zip(*(heads.chunk(groups, dim=1) for heads in (query, key, value)), strict=True)
        outs = [
            self._attend_group(layer * groups + group, selection[:, group], *piece)
            for group, piece in enumerate(pieces)
        ]
        return torch.cat(outs, dim=1)

    def _attend_group(self, cache_layer: int, selection: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        stores = [resident.records[cache_layer] for resident in self._residents]
        records = self._records.pack(key, value)
        for i, position in self._live:
            stores[i][position] = records[i]
        chosen, places = end_to_end(stores, selection)
        return attend(query, chosen, places, self._records)

    def _select(self, layer: int, query: Tensor, key: Tensor) -> Tensor:
        """All requests' states side by side, as the selector sees them in the engine: same shapes, same sums."""
        states = [resident.state[layer] for resident in self._residents]
        for i, _ in self._live:
            at = self._positions[i : i + 1]
            self._selector.append(states[i], at // PAGE_RECORDS, at, key[i : i + 1])
        return self._selector.select(*side_by_side(states), self._lengths, query).positions
