"""Runs the model over the hierarchical cache: a prefill chunk or a decode step in, logits out.

Between the model, which calls `attend` once a layer, and the cache, which sees bytes and positions, stands
an attention context: it packs records, asks the selector, resolves, and attends.
"""

import torch
from torch import Tensor

from hisparse.admission import CacheRequest
from hisparse.attention import GroupedRecords, attend, attend_tiled
from hisparse.cache import HierarchicalCache
from hisparse.engine.batch import DecodeBatch, PrefillChunk
from hisparse.errors import CapacityError
from hisparse.layout import PAGE_RECORDS
from hisparse.models.llama import Llama
from hisparse.selection_state import SelectionState
from hisparse.selectors import Selector
from hisparse.step import Step


class Runner:
    """Executes batches and keeps each request's place in the cache.

    Args:
        model: the decoder.
        selector: chooses positions; a layer of the model has `selector.num_groups` layers in the cache.
        cache: with a selection state of the selector's shape.
        records: what stands in one record of the cache.
    """

    def __init__(self, model: Llama, selector: Selector, cache: HierarchicalCache, records: GroupedRecords) -> None:
        if cache.selection_state is None:
            raise ValueError("the runner needs a cache with a selection state")
        self.model = model
        self.selector = selector
        self.cache = cache
        self.state: SelectionState = cache.selection_state
        self.records = records
        self._requests: dict[int, CacheRequest] = {}

    # Residency: see engine/scheduler.py

    def can_admit(self, max_positions: int) -> bool:
        """Whether there is room now. Raises `NeverFitsError` if there never will be."""
        return self.cache.can_admit(max_positions)

    def admit(self, request_id: int, max_positions: int) -> None:
        """Reserve what the request will need."""
        self._requests[request_id] = self.cache.admit(max_positions)

    def retire(self, request_id: int) -> None:
        """Free what the request held."""
        self.cache.retire(self._requests.pop(request_id))

    def retract(self, request_id: int) -> None:
        """Take the request off the device."""
        self.cache.retract(self._requests[request_id])

    def resume(self, request_id: int) -> bool:
        """Put it back if there is room."""
        try:
            self.cache.resume(self._requests[request_id])
        except CapacityError:
            return False
        return True

    # Forwards

    @torch.inference_mode()
    def prefill(self, chunk: PrefillChunk) -> Tensor | None:
        """Take in a piece of a prompt; logits [1, vocab] float32 after its last piece."""
        tokens = torch.tensor(chunk.tokens, device=self.model.device)
        positions = torch.arange(chunk.start, chunk.start + len(tokens), device=self.model.device)
        attend_chunk = PrefillAttention(self, self._requests[chunk.request_id], positions)
        hidden = self.model.forward(tokens, positions, attend_chunk)
        return self.model.logits(hidden[-1:]) if chunk.is_last else None

    @torch.inference_mode()
    def decode(self, batch: DecodeBatch) -> Tensor:
        """One token of each request; logits [b, vocab] float32."""
        requests = [self._requests[request_id] for request_id in batch.request_ids]
        lengths = tuple(request.length for request in requests)
        if lengths != batch.positions:
            raise ValueError(f"the batch is for positions {batch.positions}, and the cache is at {lengths}")
        tokens = torch.tensor(batch.tokens, device=self.model.device)
        with self.cache.step(requests) as step:
            hidden = self.model.forward(tokens, step.positions, DecodeAttention(self, step))
        return self.model.logits(hidden)

    def heads_of_groups(self, heads: Tensor) -> tuple[Tensor, ...]:
        """[t, heads, head_dim] cut into one piece a selection group."""
        return heads.chunk(self.selector.num_groups, dim=1)


class PrefillAttention:
    """Attention of one chunk: stages its records, then reads the whole history through the tiles."""

    def __init__(self, runner: Runner, request: CacheRequest, positions: Tensor) -> None:
        self._runner = runner
        self._request = request
        self._positions = positions  # [n] int64
        self._start = int(positions[0])
        pages = torch.tensor(request.state_pages, device=positions.device)
        self._pages = pages[positions // PAGE_RECORDS]  # [n] of the selection state

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `hisparse.models.Attend`."""
        runner = self._runner
        runner.selector.append(runner.state.data[layer], self._pages, self._positions, key)
        pieces = zip(*(runner.heads_of_groups(heads) for heads in (query, key, value)), strict=True)
        return torch.cat([self._attend_group(layer, group, *piece) for group, piece in enumerate(pieces)], dim=1)

    def _attend_group(self, layer: int, group: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        cache, records = self._runner.cache, self._runner.records
        cache_layer = layer * self._runner.selector.num_groups + group
        own = records.pack(key, value)
        cache.stage(cache_layer, self._request, self._start, own)
        return attend_tiled(query, cache.history(cache_layer, self._request, self._start), own, records)


class DecodeAttention:
    """Attention of one step: selection in, slots out, attend."""

    def __init__(self, runner: Runner, step: Step) -> None:
        self._runner = runner
        self._step = step
        self._table = runner.state.page_table[step.request_index]  # [b, pages]
        columns = (step.positions // PAGE_RECORDS)[:, None]
        self._pages = self._table.gather(1, columns)[:, 0].long()  # [b] of the selection state

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `hisparse.models.Attend`."""
        runner, step, state = self._runner, self._step, self._runner.state.data[layer]
        runner.selector.append(state, self._pages, step.positions, key)
        selection = runner.selector.select(state, self._table, step.lengths, query)
        pieces = zip(
            selection.unbind(1), *(runner.heads_of_groups(heads) for heads in (query, key, value)), strict=True
        )
        return torch.cat([self._attend_group(layer, group, *piece) for group, piece in enumerate(pieces)], dim=1)

    def _attend_group(
        self, layer: int, group: int, selection: Tensor, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        cache, records = self._runner.cache, self._runner.records
        cache_layer = layer * self._runner.selector.num_groups + group
        cache.append(cache_layer, records.pack(key, value))
        slots = cache.resolve(cache_layer, selection)
        return attend(query, cache.records(cache_layer), slots, records)
