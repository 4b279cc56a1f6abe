"""Decode steps: what a step refers to, and how it begins, ends, fails and is recorded in a CUDA graph.

Used by the cache; a `Step` is read by the engine (positions, lengths) and by the backend (rows, lines of the page
table). What a step refers to is one small tensor, so that it costs one upload. All recorded steps share one, which
every step fills anew; lines beyond the live requests are padded, and cost next to nothing.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from hisparse.admission import Admission, CacheRequest
from hisparse.backend import Backend, Outcome
from hisparse.errors import HiSparseError
from hisparse.layout import PAGE_RECORDS, CacheLayout

PADDED = (-1, 0, 0, -1, 0)  # a line that nobody takes


@dataclass(frozen=True, eq=False)
class Step:
    """One decode step. Lines of padded requests hold -1, 0, 0, -1, 0 and slots of -1."""

    requests: tuple[CacheRequest, ...]  # the live ones, in the order of the lines
    inputs: Tensor  # int64 [5, b]
    slots: Tensor  # int [groups, b], where the new records go on the device
    is_replay: bool = False  # of a recorded step: its graph does the work

    @property
    def batch_size(self) -> int:
        """Lines, padded ones included."""
        return int(self.inputs.shape[1])

    @property
    def request_index(self) -> Tensor:
        """int64 [b]: line of each request in the page tables, -1: padded."""
        return self.inputs[0]

    @property
    def positions(self) -> Tensor:
        """int64 [b]: of the records that this step produces."""
        return self.inputs[1]

    @property
    def lengths(self) -> Tensor:
        """int64 [b]: positions in each history, the new one included; 0: padded."""
        return self.inputs[2]

    @property
    def rows(self) -> Tensor:
        """int64 [b]: where the new records go on the host, -1: padded."""
        return self.inputs[3]

    @property
    def tokens(self) -> Tensor:
        """int64 [b]: what the caller gave with each request, for its model."""
        return self.inputs[4]


class Steps:
    """The step that runs, if one does. The methods are those of `HierarchicalCache`."""

    def __init__(self, layout: CacheLayout, admission: Admission, backend: Backend, device: torch.device) -> None:
        self._layout = layout
        self._admission = admission
        self._backend = backend
        self._device = device
        self._recorded_inputs = _padded_inputs(layout.max_requests, device)  # of all recorded steps
        self._padded_inputs = self._recorded_inputs.clone()
        self._before = Outcome(0, 0, 0)  # what the device said after the step before
        self._step: Step | None = None
        self._appended: set[int] = set()  # layers that got the step's records
        self._slots: dict[int, Tensor] = {}  # what resolve handed out in this step, by anchor

    @contextmanager
    def run(
        self, requests: Sequence[CacheRequest], tokens: Sequence[int], batch_size: int | None, recorded: Step | None
    ) -> Iterator[Step]:
        """One decode step; undone if the body raises."""
        step = self._begin(requests, tokens, batch_size, recorded)
        try:
            yield step
        except BaseException:
            self._undo(step)
            raise
        finally:
            self._step = None
        self._end(step)

    @contextmanager
    def record(self, batch_size: int) -> Iterator[Step]:
        """A step without requests, in the CUDA graph that is being captured."""
        self.check_idle("record_step")
        self._check_can_record(batch_size)
        inputs = self._recorded_inputs[:, :batch_size]
        step = self._open(Step((), inputs, self._insert(inputs)))
        try:
            yield step
            self._check_appended()
            self._backend.end_step()
        except BaseException:
            with suppress(Exception):  # what was forked must be joined before the capture ends, if it still can be
                self._backend.end_step()
            self._backend.forget_step()
            raise
        finally:
            self._step = None

    def seed(self, request: CacheRequest, positions: Mapping[int, Tensor]) -> None:
        """Bring the best positions of layers, int32 [m] by anchor, to the device: the best ones last."""
        self.check_idle("seed")
        pieces = {
            anchor: [piece.sort().values for piece in best.split(self._layout.top_k)]
            for anchor, best in positions.items()
            if len(best)
        }
        for number in reversed(range(max(map(len, pieces.values()), default=0))):
            self._seed(request, {anchor: piece[number] for anchor, piece in pieces.items() if number < len(piece)})

    def _seed(self, request: CacheRequest, selections: Mapping[int, Tensor]) -> None:
        """What a step does that produces no records."""
        self._backend.make_room_for_step()
        line = (request.index, request.length - 1, request.length, -1, 0)
        inputs = torch.tensor(line, device=self._device)[:, None]
        step = Step((), inputs, self._insert(inputs))
        try:
            for anchor, selection in selections.items():
                page_table = self._admission.page_table
                self._backend.resolve(anchor, selection[None], step.request_index, step.lengths, page_table)
            self._backend.end_step()
            self._check_outcome(step)
        except BaseException:
            self._undo(step)
            raise

    def current(self, call: str) -> Step:
        """The step that `call` is part of. Raises `ValueError` outside a step, and inside a replay."""
        if self._step is None:
            raise ValueError(f"{call} belongs inside `with cache.step(requests):`")
        if self._step.is_replay:
            raise ValueError(f"{call} is part of the recorded step: replay its graph instead")
        return self._step

    def check_idle(self, call: str) -> None:
        """Raise `ValueError` inside a step."""
        if self._step is not None:
            raise ValueError(f"{call} cannot be called inside a step: leave the `with cache.step(...)` block first")

    def note_resolve(self, anchor: int, slots: Tensor) -> None:
        """The anchor has its slots."""
        self._slots[anchor] = slots

    def slots_of(self, anchor: int) -> Tensor:
        """What the anchor's resolve handed out. Raises `ValueError` if there was none in this step."""
        if anchor not in self._slots:
            raise ValueError(f"layer {anchor}, the anchor, is not resolved in this step yet: resolve it first")
        return self._slots[anchor]

    def note_append(self, layer: int) -> None:
        """The layer has its new records."""
        self._appended.add(layer)

    def check_has_records(self, layer: int) -> None:
        """Raise `ValueError` unless `note_append` came for this layer."""
        if layer not in self._appended:
            raise ValueError(f"layer {layer} is resolved before `append` wrote the step's records: append first")

    def _begin(
        self, requests: Sequence[CacheRequest], tokens: Sequence[int], batch_size: int | None, recorded: Step | None
    ) -> Step:
        self.check_idle("step")
        self._admission.check_can_step(requests)
        tokens = _whole_numbers(tokens)
        if tokens and len(tokens) != len(requests):
            raise ValueError(f"tokens must be one a request, got {len(tokens)} with {len(requests)} requests")
        size = _lines_for(requests, batch_size, recorded, self._layout.max_requests)
        self._backend.make_room_for_step()
        if recorded is not None:
            _upload(requests, tokens, self._recorded_inputs)
            return self._open(Step(tuple(requests), recorded.inputs, recorded.slots, is_replay=True))
        inputs = torch.empty(len(PADDED), size, dtype=torch.int64, device=self._device)
        _upload(requests, tokens, inputs)
        return self._open(Step(tuple(requests), inputs, self._insert(inputs)))

    def _insert(self, inputs: Tensor) -> Tensor:
        """Slots for the new records of a step of these inputs; rows are as `Step.rows` says."""
        return self._backend.insert(inputs[3])

    def _open(self, step: Step) -> Step:
        self._step, self._appended, self._slots = step, set(), {}
        return step

    def _end(self, step: Step) -> None:
        try:
            if not step.is_replay:
                self._check_appended()
                self._backend.end_step()
            self._check_outcome(step)
        except BaseException:
            self._undo(step)
            raise
        self._close(step)
        for request in step.requests:
            request.length += 1
            request.staged = [request.length] * self._layout.num_layers

    def _undo(self, step: Step) -> None:
        """Free the slots that the step's new records took; the records themselves never counted."""
        self._backend.end_step()
        self._backend.release(step.rows)
        self._before = self._backend.outcome()
        self._backend.note_step(self._before.step_number)
        self._close(step)

    def _close(self, step: Step) -> None:
        """A recorded step's inputs are padded until the next: a stray replay then touches nothing."""
        if step.is_replay:
            self._recorded_inputs.copy_(self._padded_inputs)

    def _check_appended(self) -> None:
        missing = set(range(self._layout.num_layers)) - self._appended
        if missing:
            raise ValueError(
                f"the step ended without `append` for layers {sorted(missing)}: every layer needs its record"
            )

    def _check_outcome(self, step: Step) -> None:
        before, self._before = self._before, self._backend.outcome()
        inserted = (self._before.inserted - before.inserted) % 2**32
        if inserted != len(step.requests):
            raise ValueError(
                f"{inserted} new records came to the cache in a step of {len(step.requests)} requests: replay the "
                f"graph of this recorded step, once, inside `with cache.step(...)`"
            )
        self._backend.note_step(self._before.step_number)
        if failed := self._before.failed - before.failed:
            raise HiSparseError(
                f"{failed} selected records found no slot: more positions were resolved in one step than the "
                f"device pool has slots ({self._layout.num_slots} a layer). Resolve each layer once a step"
            )

    def _check_can_record(self, batch_size: int) -> None:
        if not 0 < batch_size <= self._layout.max_requests:
            raise ValueError(f"batch_size must be 1 to max_requests = {self._layout.max_requests}, got {batch_size}")
        if not self._backend.can_record or not torch.cuda.is_current_stream_capturing():
            raise ValueError(
                f"record_step records in a CUDA graph: call it inside `with torch.cuda.graph(...)`, with the cache on "
                f"a CUDA device (it is on {self._device})"
            )


def _lines_for(
    requests: Sequence[CacheRequest], batch_size: int | None, recorded: Step | None, max_requests: int
) -> int:
    if batch_size is not None and recorded is not None:
        raise ValueError("a recorded step has its batch size: give one of batch_size and recorded")
    size = recorded.batch_size if recorded is not None else len(requests) if batch_size is None else batch_size
    if size > max_requests:
        raise ValueError(f"a step has at most max_requests = {max_requests} lines, got {size}")
    if size < len(requests):
        raise ValueError(f"a step of batch size {size} has no room for {len(requests)} requests")
    return size


def _padded_inputs(batch_size: int, device: torch.device) -> Tensor:
    """The inputs of a step that nobody takes part in."""
    return torch.tensor(PADDED, device=device)[:, None].repeat(1, batch_size)


def _whole_numbers(tokens: Sequence[int]) -> Sequence[int]:
    try:
        return array("q", tokens)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"tokens must be whole numbers of 64 bits: {error}") from error


def _upload(requests: Sequence[CacheRequest], tokens: Sequence[int], inputs: Tensor) -> None:
    """Fill a step's inputs: one copy, which does not wait for the device."""
    given = tokens or [0] * len(requests)
    lines = [_line(request, token) for request, token in zip(requests, given, strict=True)]
    lines += [PADDED] * (inputs.shape[1] - len(lines))
    values = torch.tensor(lines, device="cpu").t().contiguous()
    if inputs.device.type == "cuda":
        values = values.pin_memory()  # torch keeps the pinned block until the copy is done
    inputs.copy_(values, non_blocking=True)


def _line(request: CacheRequest, token: int) -> tuple[int, int, int, int, int]:
    position = request.length
    row = request.pages[position // PAGE_RECORDS] * PAGE_RECORDS + position % PAGE_RECORDS
    return request.index, position, position + 1, row, token
