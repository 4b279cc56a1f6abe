"""Decides what a step runs: one decode of all requests that decode, and chunks of prompts for the rest of its budget.

Who is let onto the device first: by priority (the lower number), then in the order of arrival. A request takes all
that it will ever need when it is admitted, so nothing runs dry half-way. One that does not fit may have running
requests of lower priority retracted, if that makes room; they go on later, where they were.

Every decode takes part in every step, so no prompt holds answers up for longer than a budget. Chunks lie at fixed
multiples of their request's own positions, one request a forward, so that results do not depend on what else runs.
"""

from bisect import insort
from collections import deque
from collections.abc import Sequence

from hisparse.engine.batch import Batch, DecodeBatch, PrefillChunk
from hisparse.engine.request import Request, RequestState
from hisparse.engine.residency import Residency
from hisparse.errors import HiSparseError

RUNNING = (RequestState.PREFILLING, RequestState.DECODING)


class Scheduler:
    """Owns the queues of requests.

    Args:
        residency: where requests get their room.
        prefill_chunk: tokens of a prompt in one forward.
        max_num_batched_tokens: tokens of one step: one a decode, the rest for chunks. It must have room for a decode of
            all requests that can run together and for a chunk, so that neither ever waits for the other.
        buckets: sizes that decodes are padded to, ascending, where steps are recorded; none: no padding.
    """

    def __init__(
        self, residency: Residency, prefill_chunk: int, max_num_batched_tokens: int, buckets: Sequence[int] = ()
    ) -> None:
        self._residency = residency
        self._chunk = prefill_chunk
        self._budget = max_num_batched_tokens
        self.buckets = buckets
        self._oldest_is_next = True  # of prompts: see _chunks
        self.waiting: list[Request] = []  # the first in line first
        self.retracted: list[Request] = []  # likewise
        self.running: list[Request] = []  # in the order in which they came to the device
        self.num_retractions = 0  # since the start

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to do."""
        return not (self.waiting or self.running or self.retracted)

    def add(self, request: Request) -> None:
        """Queue a request. Raises `NeverFitsError` at once if it can never be admitted."""
        self._residency.fits(request)
        insort(self.waiting, request, key=_rank)

    def schedule(self) -> list[Batch]:
        """The forwards of the next step, in no particular order; none only if nothing is left to do.

        Raises `HiSparseError` if there are requests, none can run, and so none ever will.
        """
        self._take_in()
        if not self.running and not self.is_idle:
            raise self._nothing_can_run()
        decoding = [request for request in self.running if request.state is RequestState.DECODING]
        prefilling = [request for request in self.running if request.state is RequestState.PREFILLING]
        batches: list[Batch] = [_decode_batch(decoding, self.buckets)] if decoding else []
        return batches + self._chunks(prefilling, self._budget - len(decoding))

    def retract(self, request: Request) -> None:
        """Take a running request off the device; it resumes before others of its priority are admitted.

        What is read of its prompt stays read.
        """
        if request.state not in RUNNING:
            raise ValueError(f"only a running request can be retracted, this one is {request.state.value}")
        self._residency.retract(request)
        self.running.remove(request)
        insort(self.retracted, request, key=_rank)
        request.state = RequestState.RETRACTED
        self.num_retractions += 1

    def remove(self, request: Request) -> None:
        """Forget a request, wherever it is, and free what it held."""
        if request.state is RequestState.WAITING:
            self.waiting.remove(request)
        else:
            self._residency.retire(request)
            queue = self.retracted if request.state is RequestState.RETRACTED else self.running
            queue.remove(request)
        request.state = RequestState.FINISHED

    # Who is on the device

    def _take_in(self) -> None:
        """Let requests in, one after the other, while there is room or can be made.

        Nobody who waits is admitted past a waiting request that does not fit, or small ones could keep a large one away
        for ever. Retracted ones do go on past it: the host pages that it lacks may be theirs, and it can have their
        place as soon as that is enough. Requests of one priority never retract each other, so each retraction lets in
        somebody of higher priority, and without new arrivals there is an end to them.
        """
        admits = True
        while request := self._first_in_line(admits):
            victims = self._victims_for(request)
            if victims is not None:
                self._let_in(request, victims)
            elif request.state is RequestState.WAITING:
                admits = False
            else:
                return

    def _first_in_line(self, admits: bool) -> Request | None:
        """Of one priority, retracted requests come before waiting ones."""
        heads = self.retracted[:1] + self.waiting[: int(admits)]
        return min(heads, key=lambda request: request.priority, default=None)

    def _victims_for(self, request: Request) -> Sequence[Request] | None:
        """Whom to retract so that the request fits: the youngest of the lowest priority. None: it does not help."""
        if self._residency.fits(request):
            return ()
        lower = [other for other in self.running if other.priority > request.priority]
        if not lower or not self._residency.fits(request, lower):
            return None
        lower.sort(key=_rank, reverse=True)
        count = 1
        while not self._residency.fits(request, lower[:count]):
            count += 1
        return lower[:count]

    def _let_in(self, request: Request, victims: Sequence[Request]) -> None:
        for victim in victims:
            self.retract(victim)
        if request.state is RequestState.WAITING:
            self.waiting.remove(request)
            self._residency.admit(request)
            request.state = RequestState.PREFILLING
        else:
            self.retracted.remove(request)
            self._residency.resume(request)
            has_read = request.num_prefilled == len(request.prompt)
            request.state = RequestState.DECODING if has_read else RequestState.PREFILLING
        self.running.append(request)

    def _nothing_can_run(self) -> HiSparseError:
        return HiSparseError(
            f"{len(self.waiting)} waiting and {len(self.retracted)} retracted requests find no room although nothing "
            f"runs, so they would wait for ever: something other than this engine holds the cache's reservations or "
            f"pages. Let it go, or give the engine a cache of its own"
        )

    # Whose prompt goes on

    def _chunks(self, prefilling: Sequence[Request], budget: int) -> list[PrefillChunk]:
        """Chunks of up to `budget` tokens, those of the highest priority first.

        Turn by turn, the oldest prompt gets a chunk and the one with the fewest tokens left. So a long prompt takes at
        most twice as long as alone, a short one behind it likewise, and equal ones finish one after the other (with
        a round robin, all of them would finish late).
        """
        start = {request: request.num_prefilled for request in prefilling}  # of each prompt's next chunk
        oldest = deque(sorted(prefilling, key=_rank))
        shortest = deque(sorted(prefilling, key=_rank_by_tokens_left))
        chunks: list[PrefillChunk] = []
        while start:
            request = _first_of(oldest if self._oldest_is_next else shortest, start)
            chunk = self._chunk_of(request, start[request])
            if len(chunk.tokens) > budget:
                break
            chunks.append(chunk)
            budget -= len(chunk.tokens)
            start[request] += len(chunk.tokens)
            if chunk.is_last:
                del start[request]
            self._oldest_is_next = not self._oldest_is_next
        return chunks

    def _chunk_of(self, request: Request, start: int) -> PrefillChunk:
        end = min(start + self._chunk, len(request.prompt))
        return PrefillChunk(
            request_id=request.id,
            tokens=tuple(request.prompt[start:end]),
            start=start,
            max_positions=request.max_positions,
            is_last=end == len(request.prompt),
        )


def _decode_batch(requests: Sequence[Request], buckets: Sequence[int]) -> DecodeBatch:
    size = len(requests)
    return DecodeBatch(
        request_ids=tuple(request.id for request in requests),
        tokens=tuple(request.output[-1] for request in requests),
        positions=tuple(len(request.prompt) + len(request.output) - 1 for request in requests),
        padding=next((bucket for bucket in buckets if bucket >= size), size) - size,
    )


def _rank(request: Request) -> tuple[int, int]:
    """Lower is earlier. Ids count arrivals."""
    return request.priority, request.id


def _rank_by_tokens_left(request: Request) -> tuple[int, int, int]:
    return request.priority, len(request.prompt) - request.num_prefilled, request.id


def _first_of(line: deque[Request], unfinished: dict[Request, int]) -> Request:
    while line[0] not in unfinished:
        line.popleft()
    return line[0]
