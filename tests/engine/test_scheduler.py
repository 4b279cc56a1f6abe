"""What runs next, with a residency that only counts."""

import pytest

from hisparse.engine import Request, RequestState, SamplingParams
from hisparse.engine.batch import Batch, DecodeBatch, PrefillChunk
from hisparse.engine.scheduler import Scheduler
from hisparse.engine.text_stream import TextStream
from hisparse.errors import NeverFitsError

CHUNK = 10


class Room:
    """A residency for `places` requests, none of more than 1000 positions; it remembers every call."""

    def __init__(self, places: int) -> None:
        self.places = places
        self.too_large: set[int] = set()  # requests that the free places are not enough for
        self.held: set[int] = set()
        self.calls: list[tuple[str, int]] = []

    def can_admit(self, max_positions: int) -> bool:
        if max_positions > 1000:
            raise NeverFitsError(f"{max_positions} positions can never fit")
        return len(self.held) < self.places

    def admit(self, request_id: int, max_positions: int) -> None:
        self._take("admit", request_id)

    def resume(self, request_id: int) -> bool:
        if len(self.held) == self.places or request_id in self.too_large:
            return False
        self._take("resume", request_id)
        return True

    def retract(self, request_id: int) -> None:
        self.held.remove(request_id)
        self.calls.append(("retract", request_id))

    def retire(self, request_id: int) -> None:
        self.held.discard(request_id)
        self.calls.append(("retire", request_id))

    def _take(self, call: str, request_id: int) -> None:
        assert len(self.held) < self.places
        assert request_id not in self.held
        self.held.add(request_id)
        self.calls.append((call, request_id))


def make_scheduler(places: int = 2) -> tuple[Scheduler, Room]:
    room = Room(places)
    return Scheduler(room, CHUNK), room


def queue(scheduler: Scheduler, request_id: int, length: int = 5, max_tokens: int = 8) -> Request:
    prompt = [100 * request_id + place for place in range(length)]
    request = Request(request_id, prompt, SamplingParams(max_tokens=max_tokens), TextStream(str))
    scheduler.add(request)
    return request


def run_once(scheduler: Scheduler) -> Batch | None:
    """Schedule, and do to the requests what the engine does after the forward."""
    batch = scheduler.schedule()
    for request in [request for request in scheduler.running if batch is not None and takes_part(request, batch)]:
        if isinstance(batch, PrefillChunk):
            request.num_prefilled += len(batch.tokens)
            if not batch.is_last:
                continue
            request.state = RequestState.DECODING
        request.output.append(1000 * request.id + len(request.output))
    return batch


def takes_part(request: Request, batch: Batch) -> bool:
    return request.id in ((batch.request_id,) if isinstance(batch, PrefillChunk) else batch.request_ids)


def decoding(scheduler: Scheduler, count: int) -> list[Request]:
    """`count` requests of one chunk, all of them decoding."""
    requests = [queue(scheduler, request_id) for request_id in range(count)]
    while any(request.state is not RequestState.DECODING for request in requests):
        assert isinstance(run_once(scheduler), PrefillChunk)
    return requests


def test_nothing_to_do() -> None:
    scheduler, _ = make_scheduler()
    assert scheduler.is_idle
    assert scheduler.schedule() is None


@pytest.mark.parametrize("length", [1, 9, 10, 11, 20, 37])
def test_chunks_lie_at_fixed_multiples(length: int) -> None:
    scheduler, _ = make_scheduler()
    request = queue(scheduler, 0, length)
    chunks = []
    while request.state is not RequestState.DECODING:
        chunk = run_once(scheduler)
        assert isinstance(chunk, PrefillChunk)
        assert chunk.max_positions == length + 8
        chunks.append(chunk)
    assert [chunk.start for chunk in chunks] == list(range(0, length, CHUNK))
    assert [token for chunk in chunks for token in chunk.tokens] == request.prompt
    assert [chunk.is_last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_chunks_do_not_depend_on_other_requests() -> None:
    alone, _ = make_scheduler()
    queue(alone, 7, 25)
    expected = [run_once(alone) for _ in range(3)]
    crowded, _ = make_scheduler(places=4)
    decoding(crowded, 2)
    queue(crowded, 7, 25)
    queue(crowded, 8, 33)
    assert [run_once(crowded) for _ in range(3)] == expected


def test_a_prompt_runs_before_decodes_go_on() -> None:
    scheduler, _ = make_scheduler()
    decoding(scheduler, 1)
    assert isinstance(run_once(scheduler), DecodeBatch)
    queue(scheduler, 5, 20)
    assert [type(run_once(scheduler)) for _ in range(3)] == [PrefillChunk, PrefillChunk, DecodeBatch]


def test_a_decode_batch_has_each_newest_token_and_its_position() -> None:
    scheduler, _ = make_scheduler()
    queue(scheduler, 1, 7)
    queue(scheduler, 2, 25)
    for _ in range(4):
        run_once(scheduler)
    assert run_once(scheduler) == DecodeBatch((1, 2), (1000, 2000), (7, 25))
    assert run_once(scheduler) == DecodeBatch((1, 2), (1001, 2001), (8, 26))


def test_requests_are_admitted_in_order_as_room_comes() -> None:
    scheduler, room = make_scheduler(places=2)
    requests = [queue(scheduler, request_id) for request_id in range(5)]
    run_once(scheduler)
    assert room.held == {0, 1}
    assert list(scheduler.waiting) == requests[2:]
    for done, admitted in ((1, 2), (0, 3), (2, 4)):
        scheduler.remove(requests[done])
        run_once(scheduler)
        assert admitted in room.held
    assert [request_id for call, request_id in room.calls if call == "admit"] == [0, 1, 2, 3, 4]


def test_the_first_in_line_is_not_overtaken() -> None:
    """A small request behind one that must wait waits too."""
    scheduler, room = make_scheduler(places=1)
    queue(scheduler, 0)
    big, small = queue(scheduler, 1, 500), queue(scheduler, 2, 1)
    run_once(scheduler)
    assert list(scheduler.waiting) == [big, small]
    assert room.held == {0}


def test_a_request_that_never_fits_is_refused_and_not_queued() -> None:
    scheduler, room = make_scheduler()
    with pytest.raises(NeverFitsError, match="1001 positions"):
        queue(scheduler, 0, 993, max_tokens=8)
    assert scheduler.is_idle
    assert room.calls == []
    queue(scheduler, 1, 992, max_tokens=8)
    assert not scheduler.is_idle


def test_a_retracted_request_comes_back_at_once_if_there_is_room() -> None:
    scheduler, room = make_scheduler()
    first, second = decoding(scheduler, 2)
    scheduler.retract(first)
    assert first.state is RequestState.RETRACTED
    assert room.held == {1}
    assert not scheduler.is_idle
    batch = run_once(scheduler)
    assert isinstance(batch, DecodeBatch)
    assert batch.request_ids == (1, 0)
    assert first.state is second.state is RequestState.DECODING


def test_a_retracted_request_comes_back_before_others_are_admitted() -> None:
    """Even if the others would fit already: else small ones could keep a large one away for ever."""
    scheduler, room = make_scheduler()
    first, _ = decoding(scheduler, 2)
    scheduler.retract(first)
    room.too_large.add(first.id)
    waiting = queue(scheduler, 5)
    run_once(scheduler)
    assert (first.state, waiting.state) == (RequestState.RETRACTED, RequestState.WAITING)
    room.too_large.clear()
    room.places = 3
    assert run_once(scheduler) == PrefillChunk(5, tuple(waiting.prompt), 0, 13, is_last=True)
    assert (first.state, waiting.state) == (RequestState.DECODING, RequestState.DECODING)
    assert room.calls[-2:] == [("resume", first.id), ("admit", waiting.id)]


def test_retracted_requests_come_back_in_order() -> None:
    scheduler, room = make_scheduler(places=3)
    requests = decoding(scheduler, 3)
    for request in (requests[2], requests[0], requests[1]):
        scheduler.retract(request)
    run_once(scheduler)
    assert [request_id for call, request_id in room.calls if call == "resume"] == [2, 0, 1]


@pytest.mark.parametrize("state", [state for state in RequestState if state is not RequestState.DECODING])
def test_only_a_decoding_request_can_be_retracted(state: RequestState) -> None:
    scheduler, room = make_scheduler()
    request = decoding(scheduler, 1)[0]
    request.state = state
    with pytest.raises(ValueError, match=f"only a decoding request can be retracted, this one is {state.value}"):
        scheduler.retract(request)
    assert room.held == {0}


def test_removing_a_waiting_request_frees_nothing() -> None:
    scheduler, room = make_scheduler(places=1)
    queue(scheduler, 0)
    waiting = queue(scheduler, 1)
    run_once(scheduler)
    scheduler.remove(waiting)
    assert waiting.state is RequestState.FINISHED
    assert ("retire", 1) not in room.calls
    assert not scheduler.waiting


def test_removing_a_retracted_request() -> None:
    scheduler, room = make_scheduler()
    first, second = decoding(scheduler, 2)
    scheduler.retract(first)
    scheduler.remove(first)
    scheduler.remove(second)
    assert room.calls[-2:] == [("retire", 0), ("retire", 1)]
    assert scheduler.is_idle
    assert scheduler.schedule() is None
