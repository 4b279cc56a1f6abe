"""Any arrivals, cancellations, priorities and retractions: what every step must keep to, and that all of it ends."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse.engine import Request, RequestState
from hisparse.engine.batch import Batch, DecodeBatch, PrefillChunk
from hisparse.engine.scheduler import RUNNING, Scheduler
from tests.engine.rooms import CHUNK, Room, make_request, pages_of, run_step

ROOMS = st.builds(
    Room, reservations=st.integers(1, 5), host_pages=st.integers(8, 24), state_pages=st.sampled_from((8, 10, 12, 40))
)
ARRIVAL = st.tuples(  # length, max_tokens, priority: of up to eight pages, so that each fits an empty room
    st.sampled_from((1, 5, 10, 11, 30, 70)), st.integers(1, 10), st.sampled_from((0, 0, 0, -1, 1, 7))
)
ACTIONS = st.lists(
    st.one_of(
        ARRIVAL.map(lambda values: ("arrive", values)),
        st.integers(0, 50).map(lambda pick: ("cancel", pick)),
        st.integers(0, 50).map(lambda pick: ("retract", pick)),
        st.integers(1, 4).map(lambda count: ("step", count)),
    ),
    min_size=30,
    max_size=80,
)


@dataclass
class Run:
    """A scheduler that is watched, and its requests."""

    room: Room
    slack: int  # of the budget, above what a decode of all and one chunk take
    requests: list[Request] = field(default_factory=list)  # in the order of their arrival
    cancelled: set[int] = field(default_factory=set)
    had_to_read: dict[int, bool] = field(default_factory=dict)  # before the last step

    def __post_init__(self) -> None:
        self.budget = self.room.reservations + CHUNK + self.slack
        self.scheduler = Scheduler(self.room, CHUNK, self.budget)

    def arrive(self, values: tuple[int, int, int]) -> None:
        request = make_request(len(self.requests), *values)
        self.requests.append(request)
        self.scheduler.add(request)

    def cancel(self, pick: int) -> None:
        left = [request for request in self.requests if request.state is not RequestState.FINISHED]
        if left:
            self.cancelled.add(left[pick % len(left)].id)
            self.scheduler.remove(left[pick % len(left)])

    def retract(self, pick: int) -> None:
        running = self.scheduler.running
        if running:
            self.scheduler.retract(running[pick % len(running)])

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            before = {request.id: request.state for request in self.requests}
            self.had_to_read = {one.id: one.num_prefilled < len(one.prompt) for one in self.requests}
            since = len(self.room.calls)
            batches = run_step(self.scheduler)
            self.check_calls(before, self.room.calls[since:])
            self.check_batches(batches)
            self.check_nobody_waits_for_nothing()
            for request in list(self.scheduler.running):
                if len(request.output) == request.params.max_tokens:
                    self.scheduler.remove(request)

    def check_calls(self, before: dict[int, RequestState], calls: list[tuple[str, int]]) -> None:
        """Who came, went and stayed: replayed call by call."""
        states, victims = dict(before), list[Request]()
        for call, request_id in calls:
            request = self.requests[request_id]
            if call == "retract":
                assert states[request_id] in RUNNING
                victims.append(request)
                states[request_id] = RequestState.RETRACTED
                continue
            self.check_turn(request, states, victims)
            assert all(victim.priority > request.priority for victim in victims)  # so it ends
            assert self.helped(request, victims, states)
            victims = []
            states[request_id] = RequestState.PREFILLING
        assert not victims  # each retraction let somebody in

    def check_turn(self, request: Request, states: dict[int, RequestState], victims: list[Request]) -> None:
        """Nobody has come in before one who was there earlier or matters more, with one exception."""
        is_new = states[request.id] is RequestState.WAITING
        for other in self.requests:
            if other in victims or other is request:
                continue
            if states[other.id] is RequestState.RETRACTED:
                goes_first = other.priority <= request.priority if is_new else rank(other) < rank(request)
                assert not goes_first, (other, request)
            elif states[other.id] is RequestState.WAITING and is_new:  # a retracted one may go past those that wait
                assert rank(request) < rank(other)

    def helped(self, request: Request, victims: list[Request], states: dict[int, RequestState]) -> bool:
        """The last victim was needed, and each was the youngest of the lowest priority that ran."""
        running = [other for other in self.requests if states[other.id] in RUNNING]
        ranks = [rank(victim) for victim in victims]
        return ranks == sorted(ranks, reverse=True) and all(
            rank(other) < ranks[-1] for other in running if victims and other.priority > request.priority
        )

    def check_nobody_waits_for_nothing(self) -> None:
        waiting, retracted = self.scheduler.waiting[:1], self.scheduler.retracted[:1]
        assert not any(self.room.fits(request) for request in retracted)
        if waiting and not any(request.priority <= waiting[0].priority for request in retracted):
            assert not self.room.fits(waiting[0])

    def check_batches(self, batches: list[Batch]) -> None:
        """Every decode takes part, some prompt goes on, and the budget holds."""
        assert sum(len(batch.tokens) for batch in batches) <= self.budget
        decodes = [batch for batch in batches if isinstance(batch, DecodeBatch)]
        chunks = [batch for batch in batches if isinstance(batch, PrefillChunk)]
        read = {chunk.request_id for chunk in chunks}
        decoded = set(decodes[0].request_ids) if decodes else set()
        assert len(decodes) == bool(decoded)
        active = set(self.room.active)
        assert decoded.isdisjoint(read)
        assert {i for i in active if self.requests[i].state is RequestState.DECODING} <= decoded | read
        assert bool(read) == any(self.had_to_read[i] for i in active)
        assert all(chunk.start % CHUNK == 0 and len(chunk.tokens) <= CHUNK for chunk in chunks)
        assert active == {request.id for request in self.scheduler.running}

    def finish(self) -> None:
        """No starvation: every step takes some request on, so their number is bounded by the work."""
        work = sum(-(-len(request.prompt) // CHUNK) + request.params.max_tokens for request in self.requests)
        for _ in range(work):
            if self.scheduler.is_idle:
                break
            self.step()
        assert self.scheduler.is_idle
        assert not self.room.active
        assert not self.room.away
        for request in self.requests:
            assert request.state is RequestState.FINISHED
            assert request.id in self.cancelled or len(request.output) == request.params.max_tokens


def rank(request: Request) -> tuple[int, int]:
    return request.priority, request.id


@settings(max_examples=150, deadline=None)
@given(room=ROOMS, slack=st.sampled_from((0, 1, 7, 25)), actions=ACTIONS)
def test_any_schedule(room: Room, slack: int, actions: list[tuple[str, object]]) -> None:
    run = Run(room, slack)
    for name, argument in actions:
        getattr(run, name)(argument)
    run.finish()
    assert all(pages_of(request) <= 8 for request in run.requests)
