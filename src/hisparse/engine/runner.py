"""Runs the model over the hierarchical cache: a prefill chunk or a decode step in, logits out.

How a kind of model attends, and what it asks of the cache, is its family's business (family.py); here requests
have places in the cache, and batches become forwards.
"""

import torch
from torch import Tensor

from hisparse.admission import CacheRequest
from hisparse.cache import HierarchicalCache
from hisparse.engine.batch import DecodeBatch, PrefillChunk
from hisparse.engine.family import Family
from hisparse.errors import CapacityError


class Runner:
    """Executes batches and keeps each request's place in the cache.

    Args:
        family: the model, and how it attends.
        cache: of the family's shape, with a selection state.
    """

    def __init__(self, family: Family, cache: HierarchicalCache) -> None:
        self.family = family
        self.model = family.model
        self.cache = cache
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
        hidden = self.family.forward_chunk(self.cache, self._requests[chunk.request_id], tokens, positions)
        self.family.check_selections()
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
            hidden = self.family.forward_step(self.cache, step, tokens)
        self.family.check_selections()
        return self.model.logits(hidden)
