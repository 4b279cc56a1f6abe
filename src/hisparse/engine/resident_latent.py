"""Latent attention over resident records, read by position.

Shares the selector and the attention arithmetic with latent.py, and nothing of the cache.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hisparse.attention import LatentRecords, attend_latent, attend_latent_tiled
from hisparse.engine.family import Resident, end_to_end, lengths_of, side_by_side
from hisparse.layout import PAGE_RECORDS, TILE_RECORDS
from hisparse.models.attend_latent import IndexInputs
from hisparse.models.sparse_mla_config import SparseMlaConfig
from hisparse.selectors import DSA


class ResidentLatentChunk:
    """Attention of one request's chunk."""

    def __init__(
        self, config: SparseMlaConfig, selector: DSA, records: LatentRecords, resident: Resident, positions: Tensor
    ) -> None:
        self._selector, self._records, self._resident = selector, records, resident
        self._scale, self._state_layers = config.attention_scale, _state_layers(config)
        self._positions = positions  # [n] int64
        self._own: Tensor  # uint8 [n, record_bytes], the layer's own records
        self._selected: Tensor | None  # bool [n, T] of the index group; None: all

    def begin(self, layer: int, latent: Tensor, index: IndexInputs | None) -> None:
        """See `LatentAttention`."""
        self._own = self._records.pack(latent)
        self._resident.records[layer, self._positions] = self._own
        if index is None:
            return
        state = self._resident.state[self._state_layers[layer]]
        pages = torch.arange(len(state), device=latent.device)
        self._selector.append(state, self._positions // PAGE_RECORDS, self._positions, index.key)
        self._selected = self._selector.select_causal(state, pages, self._positions, index.query, index.weights)

    def attend(self, layer: int, query: Tensor) -> Tensor:
        """See `LatentAttention`."""
        start = int(self._positions[0])
        earlier = self._resident.records[layer, :start].split(TILE_RECORDS) if start else ()
        return attend_latent_tiled(query, earlier, self._own, self._records, self._scale, self._selected)


class ResidentLatentStep:
    """Attention of one token of each of several requests."""

    def __init__(
        self,
        config: SparseMlaConfig,
        selector: DSA,
        records: LatentRecords,
        residents: Sequence[Resident],
        positions: Tensor,
    ) -> None:
        self._selector, self._records, self._residents = selector, records, residents
        self._scale, self._state_layers = config.attention_scale, _state_layers(config)
        self._positions, self._lengths = positions, lengths_of(residents, positions)  # [b] int64
        self._live = [(i, p) for i, p in enumerate(positions.tolist()) if not residents[i].is_padding]
        self._selection: Tensor  # int32 [b, k] of the index group

    def begin(self, layer: int, latent: Tensor, index: IndexInputs | None) -> None:
        """See `LatentAttention`."""
        own = self._records.pack(latent)
        for i, position in self._live:
            self._residents[i].records[layer, position] = own[i]
        if index is not None:
            self._selection = self._select(self._state_layers[layer], index)

    def attend(self, layer: int, query: Tensor) -> Tensor:
        """See `LatentAttention`."""
        chosen, places = end_to_end([resident.records[layer] for resident in self._residents], self._selection)
        return attend_latent(query, chosen, places, self._records, self._scale).out

    def _select(self, state_layer: int, index: IndexInputs) -> Tensor:
        """All requests' states side by side, as the selector sees them in the engine: same shapes, same sums."""
        states = [resident.state[state_layer] for resident in self._residents]
        for i, _ in self._live:
            at = self._positions[i : i + 1]
            self._selector.append(states[i], at // PAGE_RECORDS, at, index.key[i : i + 1])
        return self._selector.select(*side_by_side(states), self._lengths, index.query, index.weights).positions


def _state_layers(config: SparseMlaConfig) -> dict[int, int]:
    """For each layer with an indexer, which of the state's layers is its own."""
    with_indexer = (layer for layer, has_one in enumerate(config.has_indexer) if has_one)
    return {layer: number for number, layer in enumerate(with_indexer)}
