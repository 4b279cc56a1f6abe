"""Grouped-query attention over the hierarchical cache: a selection a layer, or one for each KV head.

A layer of the model has `selector.num_groups` layers in the cache, each with the records of its KV heads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hisparse.admission import CacheRequest
from hisparse.attention import GroupedRecords, attend, attend_tiled
from hisparse.cache import HierarchicalCache
from hisparse.engine.family import Resident, pages_of_step, state_of
from hisparse.engine.resident_grouped import ResidentChunk, ResidentStep
from hisparse.layout import PAGE_RECORDS
from hisparse.models.llama import Llama
from hisparse.selectors import Selected, Selector
from hisparse.step import Step


@dataclass(frozen=True)
class GroupedFamily:
    """See `Family`."""

    model: Llama
    selector: Selector
    records: GroupedRecords  # of one selection group

    @property
    def top_k(self) -> int:
        """See `Family`."""
        return self.selector.top_k

    @property
    def prefills_sparsely(self) -> bool:
        """See `Family`."""
        return False

    @property
    def record_bytes(self) -> int:
        """See `Family`."""
        return self.records.record_bytes

    @property
    def anchors(self) -> tuple[int, ...]:
        """Every cache layer has a selection of its own."""
        return tuple(range(self.model.config.num_layers * self.selector.num_groups))

    @property
    def num_state_layers(self) -> int:
        """See `Family`."""
        return self.model.config.num_layers

    @property
    def page_shape(self) -> tuple[int, ...]:
        """See `Family`."""
        return self.selector.page_shape

    @property
    def state_dtype(self) -> torch.dtype:
        """See `Family`."""
        return self.selector.dtype

    @property
    def can_be_recorded(self) -> bool:
        """See `Family`."""
        return self.model.device.type == "cuda" and self.selector.can_be_recorded

    @property
    def failures(self) -> Tensor | None:
        """See `Family`."""
        return None

    def check_selections(self, num_failures: int | None = None) -> None:
        """See `Family`. A dense model's scores are its own, and so are its logits then."""

    def forward_chunk(
        self, cache: HierarchicalCache, request: CacheRequest, tokens: Tensor, positions: Tensor, *, seeds: int
    ) -> Tensor:
        """See `Family`."""
        chunk = Chunk(self, cache, request, positions, seeds=seeds)
        hidden = self.model.forward(tokens, positions, chunk)
        cache.seed(request, chunk.best)
        return hidden

    def forward_step(self, cache: HierarchicalCache, step: Step, tokens: Tensor) -> Tensor:
        """See `Family`."""
        return self.model.forward(tokens, step.positions, DecodeStep(self, cache, step))

    def forward_resident_chunk(self, resident: Resident, tokens: Tensor, positions: Tensor) -> Tensor:
        """See `Family`."""
        return self.model.forward(tokens, positions, ResidentChunk(self.selector, self.records, resident, positions))

    def forward_resident_step(self, residents: Sequence[Resident], tokens: Tensor, positions: Tensor) -> Tensor:
        """See `Family`."""
        return self.model.forward(tokens, positions, ResidentStep(self.selector, self.records, residents, positions))

    def pieces(self, *heads: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """[t, heads, head_dim] each, cut into one piece a selection group."""
        return zip(*(one.chunk(self.selector.num_groups, dim=1) for one in heads), strict=True)


class Chunk:
    """Attention of one chunk: stages its records, then reads the whole history through the tiles."""

    def __init__(
        self, family: GroupedFamily, cache: HierarchicalCache, request: CacheRequest, positions: Tensor, *, seeds: int
    ) -> None:
        self._family, self._cache, self._request, self._seeds = family, cache, request, seeds
        self._positions = positions  # [n] int64
        self._start = int(positions[0])
        self._pages = torch.tensor(request.state_pages, device=positions.device)  # of the selection state
        self.best: dict[int, Tensor] = {}  # of the last query, int32 [seeds] by cache layer

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `hisparse.models.Attend`."""
        family, state = self._family, state_of(self._cache).data[layer]
        family.selector.append(state, self._pages[self._positions // PAGE_RECORDS], self._positions, key)
        if self._seeds:
            selected = family.selector.select(state, self._pages[None], self._positions[-1:] + 1, query[-1:])
            best = selected.best(self._seeds).positions[0]
            self.best |= {layer * family.selector.num_groups + group: line for group, line in enumerate(best)}
        pieces = enumerate(family.pieces(query, key, value))
        return torch.cat([self._attend_group(layer, group, *piece) for group, piece in pieces], dim=1)

    def _attend_group(self, layer: int, group: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        records = self._family.records
        cache_layer = layer * self._family.selector.num_groups + group
        own = records.pack(key, value)
        self._cache.stage(cache_layer, self._request, self._start, own)
        return attend_tiled(query, self._cache.history(cache_layer, self._request, self._start), own, records)


class DecodeStep:
    """Attention of one step: selection in, slots out, attend."""

    def __init__(self, family: GroupedFamily, cache: HierarchicalCache, step: Step) -> None:
        self._family, self._cache, self._step = family, cache, step
        self._table, self._pages = pages_of_step(state_of(cache), step)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `hisparse.models.Attend`."""
        family, step, state = self._family, self._step, state_of(self._cache).data[layer]
        family.selector.append(state, self._pages, step.positions, key)
        selected = family.selector.select(state, self._table, step.lengths, query)
        pieces = enumerate(family.pieces(query, key, value))
        return torch.cat([self._attend_group(layer, group, selected, *piece) for group, piece in pieces], dim=1)

    def _attend_group(
        self, layer: int, group: int, selected: Selected, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        records = self._family.records
        cache_layer = layer * self._family.selector.num_groups + group
        self._cache.append(cache_layer, records.pack(key, value))
        slots = self._cache.resolve(
            cache_layer, selected.positions[:, group], lambda count: selected.best(count).of_group(group)
        )
        return attend(query, self._cache.records(cache_layer), slots, records)
