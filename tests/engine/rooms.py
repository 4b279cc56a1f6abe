"""A residency that only counts, and what it takes to drive a scheduler over it without a model."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hisparse.engine import Request, RequestState, SamplingParams
from hisparse.engine.batch import Batch, PrefillChunk
from hisparse.engine.scheduler import Scheduler
from hisparse.engine.text_stream import TextStream
from hisparse.errors import NeverFitsError

CHUNK = 10
BUDGET = 20  # of a step: room for a chunk beside ten decodes
PAGE = 10  # positions


def pages_of(request: Request) -> int:
    return -(-request.max_positions // PAGE)


@dataclass
class Room:
    """Reservations, host pages and selection-state pages, as the cache counts them. It remembers every call."""

    reservations: int
    host_pages: int
    state_pages: int
    active: dict[int, int] = field(default_factory=dict)  # request -> pages
    away: dict[int, int] = field(default_factory=dict)  # likewise of retracted ones
    calls: list[tuple[str, int]] = field(default_factory=list)

    def fits(self, request: Request, retracting: Sequence[Request] = ()) -> bool:
        assert all(other.id in self.active for other in retracting)
        pages, is_new = pages_of(request), request.state is RequestState.WAITING
        if is_new and pages > min(self.host_pages, self.state_pages):
            raise NeverFitsError(f"{pages} pages can never fit")
        held = sum(self.active.values())
        return (
            len(self.active) - len(retracting) < self.reservations
            and held - sum(pages_of(other) for other in retracting) + pages <= self.state_pages
            and not (is_new and held + sum(self.away.values()) + pages > self.host_pages)
        )

    def admit(self, request: Request) -> None:
        assert self.fits(request)
        assert request.id not in self.active | self.away
        self.active[request.id] = pages_of(request)
        self.calls.append(("admit", request.id))

    def resume(self, request: Request) -> None:
        assert self.fits(request)
        self.active[request.id] = self.away.pop(request.id)
        self.calls.append(("resume", request.id))

    def retract(self, request: Request) -> None:
        self.away[request.id] = self.active.pop(request.id)
        self.calls.append(("retract", request.id))

    def retire(self, request: Request) -> None:
        (self.active if request.id in self.active else self.away).pop(request.id)
        self.calls.append(("retire", request.id))

    def ids(self, call: str) -> list[int]:
        """The requests of every such call, in order."""
        return [request_id for name, request_id in self.calls if name == call]


def make_scheduler(
    budget: int = BUDGET, reservations: int = 2, host_pages: int = 1000, state_pages: int = 1000
) -> tuple[Scheduler, Room]:
    room = Room(reservations, host_pages, state_pages)
    return Scheduler(room, CHUNK, budget), room


def make_request(request_id: int, length: int = 5, max_tokens: int = 8, priority: int = 0) -> Request:
    prompt = [1000 * request_id + place for place in range(length)]
    return Request(request_id, prompt, SamplingParams(max_tokens=max_tokens), TextStream(str), priority)


def queue(scheduler: Scheduler, request_id: int, length: int = 5, max_tokens: int = 8, priority: int = 0) -> Request:
    request = make_request(request_id, length, max_tokens, priority)
    scheduler.add(request)
    return request


def run_step(scheduler: Scheduler) -> list[Batch]:
    """Schedule, and do to the requests what the engine does after each forward; nobody ends by itself."""
    batches = scheduler.schedule()
    running = {request.id: request for request in scheduler.running}
    for batch in batches:
        for request in (running[request_id] for request_id in batch.request_ids):
            if isinstance(batch, PrefillChunk):
                assert batch.start == request.num_prefilled
                request.num_prefilled += len(batch.tokens)
                if not batch.is_last:
                    continue
            request.state = RequestState.DECODING
            request.output.append(10_000 * request.id + len(request.output))
    return batches


def decoding(scheduler: Scheduler, count: int, **options: int) -> list[Request]:
    """`count` requests, all of them decoding."""
    requests = [queue(scheduler, request_id, **options) for request_id in range(count)]
    for _ in range(100):
        if all(request.state is RequestState.DECODING for request in requests):
            return requests
        run_step(scheduler)
    raise AssertionError("still not decoding")
