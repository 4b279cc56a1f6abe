"""Latent attention over the hierarchical cache, with an indexer's selection for each index group.

A layer's record and its indexer's inputs come first (`begin`): the selection is made and its misses are fetched while
the model is still computing the query, on a GPU on a stream of its own. Layers that share a selection follow their
anchor's slots. See `hisparse.models.attend_latent` for the contract.
"""

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from hisparse.admission import CacheRequest
from hisparse.attention import LatentRecords, attend_latent, attend_latent_tiled
from hisparse.cache import HierarchicalCache
from hisparse.engine.family import Resident, pages_of_step, state_of
from hisparse.engine.resident_latent import ResidentLatentChunk, ResidentLatentStep
from hisparse.kernels.side_stream import SideStream
from hisparse.layout import PAGE_RECORDS
from hisparse.models.attend_latent import IndexInputs
from hisparse.models.routed_experts import RoutedExperts
from hisparse.models.sparse_mla import SparseMla
from hisparse.selectors import DSA, Indexed
from hisparse.step import Step


@dataclass(frozen=True)
class LatentFamily:
    """See `Family`."""

    model: SparseMla
    selector: DSA
    records: LatentRecords
    beside: SideStream | None = None  # on a GPU: where layers select and resolve

    @property
    def top_k(self) -> int:
        """See `Family`."""
        return self.selector.top_k

    @property
    def prefills_sparsely(self) -> bool:
        """See `Family`."""
        return True

    @property
    def record_bytes(self) -> int:
        """See `Family`."""
        return self.records.record_bytes

    @property
    def anchors(self) -> tuple[int, ...]:
        """The model's: layers without an indexer use an earlier layer's selection."""
        return self.model.config.anchors

    @property
    def num_state_layers(self) -> int:
        """Layers with an indexer."""
        return sum(self.model.config.has_indexer)

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
        model = self.model
        experts = [layer.mlp for layer in model.layers if isinstance(layer.mlp, RoutedExperts)]
        return self.selector.has_kernels_for(model.config.num_index_heads, model.dtype, model.device) and all(
            mlp.can_be_recorded for mlp in experts
        )

    @property
    def failures(self) -> Tensor | None:
        """See `Family`."""
        return self.selector.failures

    def check_selections(self, num_failures: int | None = None) -> None:
        """See `Family`."""
        self.selector.check_finite(num_failures)

    def forward_chunk(
        self, cache: HierarchicalCache, request: CacheRequest, tokens: Tensor, positions: Tensor, *, seeds: int
    ) -> Tensor:
        """See `Family`."""
        chunk = LatentChunk(self, cache, request, positions, seeds=seeds)
        hidden = self.model.forward(tokens, positions, chunk)
        cache.seed(request, chunk.best)
        return hidden

    def forward_step(self, cache: HierarchicalCache, step: Step, tokens: Tensor) -> Tensor:
        """See `Family`."""
        try:
            return self.model.forward(tokens, step.positions, LatentStep(self, cache, step))
        except BaseException:
            self._give_up()
            raise

    def _give_up(self) -> None:
        """What was forked is joined, if it still can be, before the step is undone."""
        if self.beside is not None:
            with suppress(Exception):
                self.beside.join_all()
            self.beside.forget()

    def forward_resident_chunk(self, resident: Resident, tokens: Tensor, positions: Tensor) -> Tensor:
        """See `Family`."""
        attention = ResidentLatentChunk(self.model.config, self.selector, self.records, resident, positions)
        return self.model.forward(tokens, positions, attention)

    def forward_resident_step(self, residents: Sequence[Resident], tokens: Tensor, positions: Tensor) -> Tensor:
        """See `Family`."""
        attention = ResidentLatentStep(self.model.config, self.selector, self.records, residents, positions)
        return self.model.forward(tokens, positions, attention)


class LatentChunk:
    """Attention of one chunk: stages its records, then reads the whole history through the tiles."""

    def __init__(
        self, family: LatentFamily, cache: HierarchicalCache, request: CacheRequest, positions: Tensor, *, seeds: int
    ) -> None:
        self._family, self._cache, self._request, self._seeds = family, cache, request, seeds
        self.best: dict[int, Tensor] = {}  # of the last query, int32 [seeds] by anchor
        self._positions = positions  # [n] int64
        self._start = int(positions[0])
        self._pages = torch.tensor(request.state_pages, device=positions.device)
        self._own: Tensor  # uint8 [n, record_bytes], the layer's own records
        self._selected: Tensor | None  # bool [n, T] of the index group; None: all

    def begin(self, layer: int, latent: Tensor, index: IndexInputs | None) -> None:
        """See `LatentAttention`."""
        self._own = self._family.records.pack(latent)
        self._cache.stage(layer, self._request, self._start, self._own)
        if index is None:
            return
        selector, state = self._family.selector, state_of(self._cache).data[self._cache.layout.group_of[layer]]
        selector.append(state, self._pages[self._positions // PAGE_RECORDS], self._positions, index.key)
        self._selected = selector.select_causal(state, self._pages, self._positions, index.query, index.weights)
        if self._seeds:
            last = self._pages[None], self._positions[-1:] + 1, index.query[-1:], index.weights[-1:]
            best = selector.select(state, *last).best(self._seeds)
            self.best[layer] = best.positions[0]

    def attend(self, layer: int, query: Tensor) -> Tensor:
        """See `LatentAttention`."""
        earlier = self._cache.history(layer, self._request, self._start)
        scale = self._family.model.config.attention_scale
        return attend_latent_tiled(query, earlier, self._own, self._family.records, scale, self._selected)


class LatentStep:
    """Attention of one step: selection in, slots out, attend; shared layers follow."""

    def __init__(self, family: LatentFamily, cache: HierarchicalCache, step: Step) -> None:
        self._family, self._cache, self._step = family, cache, step
        self._table, self._pages = pages_of_step(state_of(cache), step)
        self._slots: Tensor  # int32 [b, k] of the layer of the last `begin`, if it is an anchor

    def begin(self, layer: int, latent: Tensor, index: IndexInputs | None) -> None:
        """See `LatentAttention`."""
        records = self._family.records.pack(latent)
        if index is None:
            self._cache.append(layer, records)
            return
        beside = self._family.beside
        with beside.fork(layer, keep=(records, *index)) if beside else nullcontext():
            self._cache.append(layer, records)
            selected = self._select(layer, index)
            self._slots = self._cache.resolve(layer, selected.positions, selected.best)

    def attend(self, layer: int, query: Tensor) -> Tensor:
        """See `LatentAttention`."""
        if self._cache.layout.anchors[layer] != layer:
            slots = self._cache.follow(layer)
        else:
            slots = self._slots
            if self._family.beside:
                self._family.beside.join(layer)
        scale = self._family.model.config.attention_scale
        return attend_latent(query, self._cache.records(layer), slots, self._family.records, scale).out

    def _select(self, layer: int, index: IndexInputs) -> Indexed:
        selector, state = self._family.selector, state_of(self._cache).data[self._cache.layout.group_of[layer]]
        selector.append(state, self._pages, self._step.positions, index.key)
        return selector.select(state, self._table, self._step.lengths, index.query, index.weights)
