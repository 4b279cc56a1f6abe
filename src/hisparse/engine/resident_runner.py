"""A resident run: every record in one contiguous tensor a request, read by position.

It is what hierarchical outputs are compared with, so it shares the model, the selector and the attention
arithmetic with the engine, and nothing of the cache: no pages, rows, slots or tables. Given the same batches
it must produce the same logits, bit for bit.
"""

import torch
from torch import Tensor

from hisparse.engine.batch import Batch, DecodeBatch, PrefillChunk
from hisparse.engine.family import Family, Resident
from hisparse.layout import num_pages_for


class ResidentRunner:
    """Runs the batches of another runner on resident records."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.model = family.model
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
        tokens = torch.tensor(chunk.tokens, device=self.model.device)
        positions = torch.arange(chunk.start, chunk.start + len(tokens), device=self.model.device)
        hidden = self.family.forward_resident_chunk(self.requests[chunk.request_id], tokens, positions)
        return self.model.logits(hidden[-1:]) if chunk.is_last else None

    @torch.inference_mode()
    def _decode(self, batch: DecodeBatch) -> Tensor:
        padding = [0] * batch.padding
        tokens = torch.tensor([*batch.tokens, *padding], device=self.model.device)
        positions = torch.tensor([*batch.positions, *padding], device=self.model.device)
        residents = [self.requests[request_id] for request_id in batch.request_ids]
        if padding:
            residents += [self._allocate(1, is_padding=True)] * len(padding)
        hidden = self.family.forward_resident_step(residents, tokens, positions)
        return self.model.logits(hidden)[: len(batch.request_ids)]

    def _allocate(self, max_positions: int, *, is_padding: bool = False) -> Resident:
        family, device = self.family, self.model.device
        num_pages = 0 if is_padding else num_pages_for(max_positions)
        records = (len(family.anchors), max_positions, family.record_bytes)
        state = (family.num_state_layers, num_pages, *family.page_shape)
        return Resident(
            torch.zeros(records, dtype=torch.uint8, device=device),
            torch.zeros(state, dtype=family.state_dtype, device=device),
            is_padding,
        )
