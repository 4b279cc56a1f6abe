"""A resident run: every record in one contiguous tensor a request, read by position.

It is what hierarchical outputs are compared with, so it shares the model, the selector and the attention
arithmetic with the engine, and nothing of the cache: no pages, rows, slots or tables. Given the same batches
it must produce the same logits, bit for bit.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hisparse.attention import GroupedRecords, attend, attend_tiled
from hisparse.engine.batch import Batch, DecodeBatch, PrefillChunk
from hisparse.layout import PAGE_RECORDS, TILE_RECORDS, num_pages_for
from hisparse.models.llama import Llama
from hisparse.selectors import Selector


@dataclass
class Resident:
    """One request's records and selection state, whole."""

    records: Tensor  # uint8 [layers, groups, max_positions, record_bytes]
    state: Tensor  # [layers, state pages, *page_shape]


class ResidentRunner:
    """Runs the batches of another runner on resident records."""

    def __init__(self, model: Llama, selector: Selector, records: GroupedRecords) -> None:
        self.model = model
        self.selector = selector
        self.records = records
        self.requests: dict[int, Resident] = {}

    def run(self, batch: Batch) -> Tensor | None:
        """Logits [b, vocab] float32, or None for a chunk in the middle of a prompt."""
        if isinstance(batch, PrefillChunk):
            return self._prefill(batch)
        return self._decode(batch)

    def finish(self, request_id: int) -> None:
        """Forget a request."""
        self.requests.pop(request_id, None)

    @torch.inference_mode()
    def _prefill(self, chunk: PrefillChunk) -> Tensor | None:
        if chunk.start == 0:
            self.requests[chunk.request_id] = self._allocate(chunk.max_positions)
        resident = self.requests[chunk.request_id]
        tokens = torch.tensor(chunk.tokens, device=self.model.device)
        positions = torch.arange(chunk.start, chunk.start + len(tokens), device=self.model.device)

        def attend_chunk(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            self._append_state(resident, layer, positions, key)
            outs = []
            for group, (q, k, v) in enumerate(self._groups(query, key, value)):
                store = resident.records[layer, group]
                own = self.records.pack(k, v)
                store[positions] = own
                earlier = store[: chunk.start].split(TILE_RECORDS) if chunk.start else ()
                outs.append(attend_tiled(q, earlier, own, self.records))
            return torch.cat(outs, dim=1)

        hidden = self.model.forward(tokens, positions, attend_chunk)
        return self.model.logits(hidden[-1:]) if chunk.is_last else None

    @torch.inference_mode()
    def _decode(self, batch: DecodeBatch) -> Tensor:
        tokens = torch.tensor(batch.tokens, device=self.model.device)
        positions = torch.tensor(batch.positions, device=self.model.device)
        residents = [self.requests[request_id] for request_id in batch.request_ids]

        def attend_step(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            selection = self._select(residents, layer, positions, query, key)  # [b, groups, k]
            outs = []
            for group, (q, k, v) in enumerate(self._groups(query, key, value)):
                stores = [resident.records[layer, group] for resident in residents]
                for store, position, record in zip(stores, batch.positions, self.records.pack(k, v), strict=True):
                    store[position] = record
                outs.append(self._attend(q, stores, selection[:, group]))
            return torch.cat(outs, dim=1)

        return self.model.logits(self.model.forward(tokens, positions, attend_step))

    def _attend(self, query: Tensor, stores: list[Tensor], selection: Tensor) -> Tensor:
        """Attend by position: the selected records of each request, laid end to end, in selection order."""
        chosen = torch.cat([store[row.clamp(min=0).long()] for store, row in zip(stores, selection, strict=True)])
        places = torch.arange(chosen.shape[0], device=chosen.device).view(selection.shape)
        return attend(query, chosen, places.masked_fill(selection < 0, -1), self.records)

    def _select(self, residents: list[Resident], layer: int, positions: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """All requests' states side by side, as the selector sees them in the engine: same shapes, same sums."""
        for i, resident in enumerate(residents):
            self._append_state(resident, layer, positions[i : i + 1], key[i : i + 1])
        widths = [resident.state.shape[1] for resident in residents]
        state = torch.cat([resident.state[layer] for resident in residents])
        table = torch.full((len(residents), max(widths)), -1, device=state.device)
        for i, width in enumerate(widths):
            table[i, :width] = torch.arange(width) + sum(widths[:i])
        return self.selector.select(state, table, positions + 1, query)

    def _append_state(self, resident: Resident, layer: int, positions: Tensor, keys: Tensor) -> None:
        self.selector.append(resident.state[layer], positions // PAGE_RECORDS, positions, keys)

    def _groups(self, query: Tensor, key: Tensor, value: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        groups = self.selector.num_groups
        return zip(*(heads.chunk(groups, dim=1) for heads in (query, key, value)), strict=True)

    def _allocate(self, max_positions: int) -> Resident:
        layers, groups, device = self.model.config.num_layers, self.selector.num_groups, self.model.device
        pages = num_pages_for(max_positions)
        return Resident(
            torch.zeros(layers, groups, max_positions, self.records.record_bytes, dtype=torch.uint8, device=device),
            torch.zeros(layers, pages, *self.selector.page_shape, dtype=self.selector.dtype, device=device),
        )
