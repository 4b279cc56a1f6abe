"""What runs next, with a residency that only counts."""

import pytest

from hisparse.engine import Request, RequestState
from hisparse.engine.batch import Batch, DecodeBatch, PrefillChunk
from hisparse.engine.scheduler import Scheduler
from hisparse.errors import HiSparseError, NeverFitsError
from tests.engine.rooms import CHUNK, decoding, make_request, make_scheduler, queue, run_step


def chunks_of(batches: list[Batch], request_id: int) -> list[PrefillChunk]:
    return [batch for batch in batches if isinstance(batch, PrefillChunk) and batch.request_id == request_id]


def steps(scheduler: Scheduler, count: int) -> list[Batch]:
    return [batch for _ in range(count) for batch in run_step(scheduler)]


def test_nothing_to_do() -> None:
    scheduler, _ = make_scheduler()
    assert scheduler.is_idle
    assert scheduler.schedule() == []


# A step


@pytest.mark.parametrize("length", [1, 9, 10, 11, 20, 37])
def test_chunks_lie_at_fixed_multiples(length: int) -> None:
    scheduler, _ = make_scheduler()
    request = queue(scheduler, 0, length)
    chunks = chunks_of(steps(scheduler, 2), 0)
    assert {chunk.max_positions for chunk in chunks} == {length + 8}
    assert [chunk.start for chunk in chunks] == list(range(0, length, CHUNK))
    assert [token for chunk in chunks for token in chunk.tokens] == request.prompt
    assert [chunk.is_last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_chunks_do_not_depend_on_other_requests() -> None:
    alone, _ = make_scheduler()
    queue(alone, 7, 25)
    expected = chunks_of(steps(alone, 3), 7)
    crowded, _ = make_scheduler(reservations=4)
    decoding(crowded, 2)
    queue(crowded, 7, 25)
    queue(crowded, 8, 33)
    assert chunks_of(steps(crowded, 9), 7) == expected


def test_decodes_go_on_in_every_step_of_a_long_prompt() -> None:
    scheduler, _ = make_scheduler(budget=12)
    first = decoding(scheduler, 1)[0]
    queue(scheduler, 5, 40)
    for count in range(4):
        assert [type(batch) for batch in run_step(scheduler)] == [DecodeBatch, PrefillChunk]
        assert len(first.output) == 2 + count
    assert run_step(scheduler) == [DecodeBatch((0, 5), (4, 50_000), (9, 40))]


def test_the_budget_is_shared_by_decodes_and_chunks() -> None:
    """Eleven requests decode, and 37 - 11 tokens are two chunks of ten and a short one of six."""
    scheduler, _ = make_scheduler(budget=37, reservations=20)
    decoding(scheduler, 11)
    long, short = queue(scheduler, 20, 100), queue(scheduler, 21, 6)
    decode, *chunks = run_step(scheduler)
    assert len(decode.request_ids) == 11
    assert sorted((chunk.request_ids, len(chunk.tokens)) for chunk in chunks) == [((20,), 10), ((20,), 10), ((21,), 6)]
    assert (long.num_prefilled, short.state) == (20, RequestState.DECODING)


def test_a_decode_batch_has_each_newest_token_and_its_position() -> None:
    scheduler, _ = make_scheduler()
    queue(scheduler, 1, 7)
    queue(scheduler, 2, 10)
    run_step(scheduler)
    assert run_step(scheduler) == [DecodeBatch((1, 2), (10_000, 20_000), (7, 10))]
    assert run_step(scheduler) == [DecodeBatch((1, 2), (10_001, 20_001), (8, 11))]


# Several prompts


def test_a_short_prompt_behind_a_long_one_takes_turns_with_it() -> None:
    scheduler, _ = make_scheduler(budget=13)
    long = queue(scheduler, 0, 1000, max_tokens=1)
    steps(scheduler, 3)
    short = queue(scheduler, 1, 30)
    steps(scheduler, 6)
    assert short.state is RequestState.DECODING
    assert long.num_prefilled == 60


def test_a_long_prompt_gets_every_second_chunk_of_a_stream_of_short_ones() -> None:
    scheduler, _ = make_scheduler(budget=13)
    long = queue(scheduler, 0, 200)
    for request_id in range(1, 41):
        short = queue(scheduler, request_id)
        run_step(scheduler)
        if short.state is RequestState.DECODING:
            scheduler.remove(short)
        if request_id == 39:
            assert long.num_prefilled >= 190
    assert long.num_prefilled == 200


def test_equal_prompts_finish_one_after_the_other() -> None:
    scheduler, _ = make_scheduler(budget=15, reservations=5)
    requests = [queue(scheduler, request_id, 30) for request_id in range(5)]
    for count in range(5):
        steps(scheduler, 3)
        assert [request.state is RequestState.DECODING for request in requests] == [i <= count for i in range(5)]


def test_prompts_of_higher_priority_are_read_first() -> None:
    scheduler, _ = make_scheduler(budget=13, reservations=3)
    low = queue(scheduler, 0, 50, priority=1)
    steps(scheduler, 2)
    high = queue(scheduler, 1, 100, priority=-1)
    steps(scheduler, 10)
    assert (high.state, low.num_prefilled) == (RequestState.DECODING, 20)
    steps(scheduler, 4)
    assert low.num_prefilled == 50


# Who is let in


def test_requests_are_admitted_in_order_as_room_comes() -> None:
    scheduler, room = make_scheduler(reservations=2)
    requests = [queue(scheduler, request_id) for request_id in range(5)]
    run_step(scheduler)
    assert set(room.active) == {0, 1}
    assert scheduler.waiting == requests[2:]
    for done, admitted in ((1, 2), (0, 3), (2, 4)):
        scheduler.remove(requests[done])
        run_step(scheduler)
        assert admitted in room.active
    assert room.ids("admit") == [0, 1, 2, 3, 4]


def test_priorities_come_before_the_order_of_arrival() -> None:
    scheduler, room = make_scheduler(reservations=1)
    for request_id, priority in enumerate((0, 5, -3, 0, 5, -3)):
        queue(scheduler, request_id, priority=priority)
    while not scheduler.is_idle:
        run_step(scheduler)
        scheduler.remove(scheduler.running[0])
    assert room.ids("admit") == [2, 5, 0, 3, 1, 4]


@pytest.mark.parametrize("priority", [0, 1])
def test_the_first_in_line_is_not_overtaken(priority: int) -> None:
    """A small request behind one that must wait waits too, and so does one of lower priority."""
    scheduler, room = make_scheduler(reservations=3, host_pages=60)
    queue(scheduler, 0)
    big, small = queue(scheduler, 1, 585), queue(scheduler, 2, 1, priority=priority)
    run_step(scheduler)
    assert scheduler.waiting == [big, small]
    assert set(room.active) == {0}


def test_a_request_that_never_fits_is_refused_and_not_queued() -> None:
    scheduler, room = make_scheduler(host_pages=100)
    with pytest.raises(NeverFitsError, match="101 pages"):
        queue(scheduler, 0, 993, max_tokens=8)
    assert scheduler.is_idle
    assert room.calls == []
    queue(scheduler, 1, 992, max_tokens=8)
    assert not scheduler.is_idle


def test_requests_that_can_never_run_are_an_error_and_not_a_wait() -> None:
    scheduler, room = make_scheduler(reservations=1)
    queue(scheduler, 0)
    room.active[99] = 1  # somebody else's
    for _ in range(2):
        with pytest.raises(
            HiSparseError, match=r"1 waiting and 0 retracted requests find no room although nothing runs"
        ):
            scheduler.schedule()
    del room.active[99]
    assert len(run_step(scheduler)) == 1


# Retracting


def test_a_retracted_request_comes_back_at_once_if_there_is_room() -> None:
    scheduler, room = make_scheduler()
    first, second = decoding(scheduler, 2)
    scheduler.retract(first)
    assert first.state is RequestState.RETRACTED
    assert set(room.active) == {1}
    assert not scheduler.is_idle
    assert [batch.request_ids for batch in run_step(scheduler)] == [(1, 0)]
    assert first.state is second.state is RequestState.DECODING


def test_a_retracted_request_comes_back_before_others_are_admitted() -> None:
    """Even if the others would fit already: else small ones could keep a large one away for ever."""
    scheduler, room = make_scheduler(reservations=3)
    first, second = decoding(scheduler, 2, length=100)
    scheduler.retract(first)
    room.state_pages = 15
    waiting = queue(scheduler, 5)
    run_step(scheduler)
    assert (first.state, waiting.state) == (RequestState.RETRACTED, RequestState.WAITING)
    scheduler.remove(second)
    run_step(scheduler)
    assert (first.state, waiting.state) == (RequestState.DECODING, RequestState.DECODING)
    assert room.calls[-2:] == [("resume", first.id), ("admit", waiting.id)]


def test_retracted_requests_come_back_by_priority_and_age() -> None:
    scheduler, room = make_scheduler(reservations=4)
    requests = [queue(scheduler, request_id, priority=priority) for request_id, priority in enumerate((0, 0, 0, -1))]
    steps(scheduler, 4)
    for request in (requests[2], requests[0], requests[3], requests[1]):
        scheduler.retract(request)
    run_step(scheduler)
    assert room.ids("resume") == [3, 0, 1, 2]


def test_a_higher_priority_retracts_the_youngest_of_the_lowest() -> None:
    scheduler, room = make_scheduler(reservations=5)
    requests = [queue(scheduler, request_id, priority=priority) for request_id, priority in enumerate((2, 3, 3, 1, 2))]
    steps(scheduler, 5)
    for request_id in range(10, 14):
        queue(scheduler, request_id, priority=1)
    run_step(scheduler)
    assert room.ids("retract") == [2, 1, 4, 0]
    assert room.calls[-8:][::2] == [("retract", request_id) for request_id in (2, 1, 4, 0)]
    assert room.calls[-8:][1::2] == [("admit", request_id) for request_id in range(10, 14)]
    assert scheduler.retracted == [requests[0], requests[4], requests[1], requests[2]]
    assert scheduler.num_retractions == 4
    queue(scheduler, 14, priority=1)
    run_step(scheduler)
    assert scheduler.num_retractions == 4  # what is left is of the same priority


def test_a_prompt_that_is_being_read_is_retracted_and_goes_on_where_it_was() -> None:
    scheduler, room = make_scheduler(budget=13, reservations=1)
    low = queue(scheduler, 0, 30, priority=1)
    run_step(scheduler)
    high = queue(scheduler, 1)
    run_step(scheduler)
    assert (set(room.active), set(room.away)) == ({1}, {0})
    assert (low.state, low.num_prefilled, high.state) == (RequestState.RETRACTED, 10, RequestState.DECODING)
    scheduler.remove(high)
    assert [(chunk.start, chunk.is_last) for chunk in chunks_of(steps(scheduler, 2), 0)] == [(10, False), (20, True)]
    assert (low.state, room.ids("resume")) == (RequestState.DECODING, [0])


def test_a_prompt_of_which_nothing_is_read_yet_is_retracted_too() -> None:
    scheduler, room = make_scheduler(budget=13, reservations=2)
    first, second = (queue(scheduler, request_id, 30, priority=1) for request_id in range(2))
    run_step(scheduler)
    assert (first.num_prefilled, second.num_prefilled) == (10, 0)
    urgent = [queue(scheduler, request_id, 5) for request_id in (2, 3)]
    run_step(scheduler)
    assert room.ids("retract") == [1, 0]
    for request in urgent:
        scheduler.remove(request)
    assert [chunk.start for chunk in chunks_of(steps(scheduler, 5), 1)] == [0, 10, 20]


def test_those_that_read_and_those_that_decode_are_victims_by_the_same_order() -> None:
    scheduler, room = make_scheduler(budget=14, reservations=4)
    queue(scheduler, 0, 5, priority=2)
    queue(scheduler, 1, 5, priority=3)
    steps(scheduler, 2)
    queue(scheduler, 2, 50, priority=3)
    queue(scheduler, 3, 50, priority=2)
    run_step(scheduler)
    assert [request.state is RequestState.DECODING for request in scheduler.running] == [True, True, False, False]
    for request_id in range(4, 8):
        queue(scheduler, request_id, 5)
    run_step(scheduler)
    assert room.ids("retract") == [2, 1, 3, 0]


def test_nobody_is_retracted_for_host_pages_since_that_frees_none() -> None:
    scheduler, room = make_scheduler(reservations=5, host_pages=20)
    low = decoding(scheduler, 2, length=70, priority=1)
    high = queue(scheduler, 5, 70)
    steps(scheduler, 50)
    assert scheduler.num_retractions == 0
    scheduler.remove(low[0])
    run_step(scheduler)
    assert high.id in room.active


def test_only_as_many_are_retracted_as_make_room() -> None:
    scheduler, room = make_scheduler(reservations=6, state_pages=20)
    decoding(scheduler, 5, length=22, priority=1)  # three pages each
    queue(scheduler, 5, 70)  # eight pages, and five are free
    run_step(scheduler)
    assert room.ids("retract") == [4]


def test_retracted_requests_go_on_past_one_that_lacks_their_host_pages() -> None:
    """Else both would wait for each other for ever. It gets their place as soon as that is enough."""
    scheduler, room = make_scheduler(reservations=1, host_pages=20)
    low = decoding(scheduler, 1, length=70, priority=2)[0]
    middle = queue(scheduler, 1, 22, priority=1)
    run_step(scheduler)
    assert set(room.away) == {low.id}
    high = queue(scheduler, 2, 92, priority=0)  # ten pages; eight and three are taken
    scheduler.remove(middle)
    room.host_pages = 17
    steps(scheduler, 3)
    assert (low.state, high.state) == (RequestState.DECODING, RequestState.WAITING)
    room.host_pages = 18
    run_step(scheduler)
    assert (low.state, high.state) == (RequestState.RETRACTED, RequestState.PREFILLING)
    assert scheduler.num_retractions == 2


def test_no_ping_pong() -> None:
    """Each retraction lets in a request of higher priority that was not in before: there are no more of them."""
    scheduler, room = make_scheduler(reservations=2)
    low = decoding(scheduler, 2, priority=9, max_tokens=400)
    for request_id in range(2, 42):
        queue(scheduler, request_id, priority=request_id % 3)
        for request in decoding_after_a_step(scheduler):
            if request.priority < 9:
                scheduler.remove(request)
    steps(scheduler, 100)
    assert scheduler.num_retractions <= 40
    assert all(request.state is RequestState.DECODING for request in low)
    assert len(room.ids("resume")) == scheduler.num_retractions


def decoding_after_a_step(scheduler: Scheduler) -> list[Request]:
    run_step(scheduler)
    return [request for request in scheduler.running if request.state is RequestState.DECODING]


@pytest.mark.parametrize("state", [RequestState.WAITING, RequestState.RETRACTED, RequestState.FINISHED])
def test_only_a_running_request_can_be_retracted(state: RequestState) -> None:
    scheduler, room = make_scheduler()
    request = decoding(scheduler, 1)[0]
    request.state = state
    with pytest.raises(ValueError, match=f"only a running request can be retracted, this one is {state.value}"):
        scheduler.retract(request)
    assert set(room.active) == {0}


# Removing


def test_removing_a_waiting_request_frees_nothing() -> None:
    scheduler, room = make_scheduler(reservations=1)
    queue(scheduler, 0)
    waiting = queue(scheduler, 1)
    run_step(scheduler)
    scheduler.remove(waiting)
    assert waiting.state is RequestState.FINISHED
    assert ("retire", 1) not in room.calls
    assert not scheduler.waiting


def test_removing_a_prefilling_request() -> None:
    scheduler, room = make_scheduler(budget=13)
    requests = [queue(scheduler, request_id, 30) for request_id in range(2)]
    run_step(scheduler)
    scheduler.remove(requests[0])
    assert [batch.request_ids for batch in steps(scheduler, 3)] == [(1,)] * 3
    assert room.ids("retire") == [0]


def test_removing_a_retracted_request() -> None:
    scheduler, room = make_scheduler()
    first, second = decoding(scheduler, 2)
    scheduler.retract(first)
    scheduler.remove(first)
    scheduler.remove(second)
    assert room.calls[-2:] == [("retire", 0), ("retire", 1)]
    assert scheduler.is_idle
    assert scheduler.schedule() == []


def test_waiting_requests_keep_their_place_however_they_come() -> None:
    scheduler, _ = make_scheduler(reservations=1)
    for request_id, priority in ((3, 1), (1, 0), (2, 1), (4, 0)):
        scheduler.add(make_request(request_id, priority=priority))
    assert [request.id for request in scheduler.waiting] == [1, 4, 2, 3]
