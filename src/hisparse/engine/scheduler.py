"""Decides what runs next: admits waiting requests, cuts prompts into chunks, batches decodes.

First come, first served. A prompt runs before decodes go on; chunks lie at fixed multiples of the request's
own positions, one request a forward, so that results do not depend on what else is running.
"""

from collections import deque
from typing import Protocol

from hisparse.engine.batch import Batch, DecodeBatch, PrefillChunk
from hisparse.engine.request import Request, RequestState


class Residency(Protocol):
    """What the scheduler asks of the runner: room for requests."""

    def can_admit(self, max_positions: int) -> bool:
        """Whether there is room now. Raises `NeverFitsError` if there never will be."""

    def admit(self, request_id: int, max_positions: int) -> None:
        """Take a request on."""

    def resume(self, request_id: int) -> bool:
        """Put a retracted request back if there is room."""

    def retract(self, request_id: int) -> None:
        """Take a request off the device, keeping its history."""

    def retire(self, request_id: int) -> None:
        """Let a request go."""


class Scheduler:
    """Owns the queues of requests.

    Args:
        residency: where requests get their room.
        prefill_chunk: tokens of a prompt in one forward.
    """

    def __init__(self, residency: Residency, prefill_chunk: int) -> None:
        self._residency = residency
        self._chunk = prefill_chunk
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.retracted: deque[Request] = deque()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to do."""
        return not (self.waiting or self.running or self.retracted)

    def add(self, request: Request) -> None:
        """Queue a request. Raises `NeverFitsError` at once if it can never be admitted."""
        self._residency.can_admit(request.max_positions)
        self.waiting.append(request)

    def schedule(self) -> Batch | None:
        """The next forward, or None if nothing can run."""
        self._resume()
        self._admit()
        for request in self.running:
            if request.state is RequestState.PREFILLING:
                return self._next_chunk(request)
        return self._decode_batch()

    def retract(self, request: Request) -> None:
        """Take a decoding request off the device; it resumes before others are admitted."""
        if request.state is not RequestState.DECODING:
            raise ValueError(f"only a decoding request can be retracted, this one is {request.state.value}")
        self._residency.retract(request.id)
        self.running.remove(request)
        self.retracted.append(request)
        request.state = RequestState.RETRACTED

    def remove(self, request: Request) -> None:
        """Forget a request, wherever it is, and free what it held."""
        if request.state is RequestState.WAITING:
            self.waiting.remove(request)
        else:
            self._residency.retire(request.id)
            queue = self.retracted if request.state is RequestState.RETRACTED else self.running
            queue.remove(request)
        request.state = RequestState.FINISHED

    def _resume(self) -> None:
        while self.retracted and self._residency.resume(self.retracted[0].id):
            request = self.retracted.popleft()
            request.state = RequestState.DECODING
            self.running.append(request)

    def _admit(self) -> None:
        while self.waiting and not self.retracted and self._residency.can_admit(self.waiting[0].max_positions):
            request = self.waiting.popleft()
            self._residency.admit(request.id, request.max_positions)
            request.state = RequestState.PREFILLING
            self.running.append(request)

    def _next_chunk(self, request: Request) -> PrefillChunk:
        start = request.num_prefilled
        end = min(start + self._chunk, len(request.prompt))
        return PrefillChunk(
            request_id=request.id,
            tokens=tuple(request.prompt[start:end]),
            start=start,
            max_positions=request.max_positions,
            is_last=end == len(request.prompt),
        )

    def _decode_batch(self) -> DecodeBatch | None:
        if not self.running:
            return None
        return DecodeBatch(
            request_ids=tuple(request.id for request in self.running),
            tokens=tuple(request.output[-1] for request in self.running),
            positions=tuple(len(request.prompt) + len(request.output) - 1 for request in self.running),
        )
