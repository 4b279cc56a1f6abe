"""Decode steps: what a step refers to, and how it begins, ends, fails and is recorded in a CUDA graph.

Used by the cache; a `Step` is read by the engine (positions, lengths) and by the backend (rows, lines of the page
table). What a step refers to is one small tensor, so that it costs one upload. A recorded step keeps its tensor, and
every replay fills it anew; lines beyond the live requests are padded, and cost next to nothing.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from hisparse.admission import Admission, CacheRequest
from hisparse.backend import Backend
from hisparse.errors import HiSparseError
from hisparse.layout import PAGE_RECORDS, CacheLayout

NUM_INPUTS = 4


@dataclass(frozen=True, eq=False)
class Step:
    """One decode step. Lines of padded requests hold -1, 0, 0, -1 and slots of -1."""

    requests: tuple[CacheRequest, ...]  # the live ones, in the order of the lines
    inputs: Tensor  # int64 [4, b]
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


class Steps:
    """The step that runs, if one does. The methods are those of `HierarchicalCache`."""

    def __init__(self, layout: CacheLayout, admission: Admission, backend: Backend, device: torch.device) -> None:
        self._layout = layout
        self._admission = admission
        self._backend = backend
        self._device = device
        self._step: Step | None = None
        self._appended: set[int] = set()  # layers that got the step's records
        self._slots: dict[int, Tensor] = {}  # what resolve handed out in this step, by anchor
        self._failed_before = 0  # records that found no slot, before this step

    @contextmanager
    def run(self, requests: Sequence[CacheRequest], batch_size: int | None, recorded: Step | None) -> Iterator[Step]:
        """One decode step; undone if the body raises."""
        step = self._begin(requests, batch_size, recorded)
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
        inputs = _new_inputs(batch_size, self._device)
        self._open(Step((), inputs, self._backend.insert(inputs[-1])))
        try:
            yield self.current("record_step")
            self._check_appended()
        finally:
            self._step = None
            self._backend.end_step()

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

    def _begin(self, requests: Sequence[CacheRequest], batch_size: int | None, recorded: Step | None) -> Step:
        self.check_idle("step")
        self._admission.check_can_step(requests)
        size = _lines_for(requests, batch_size, recorded)
        self._backend.begin_step()
        inputs = _new_inputs(size, self._device) if recorded is None else recorded.inputs
        _upload(requests, inputs)
        slots = self._backend.insert(inputs[-1]) if recorded is None else recorded.slots
        return self._open(Step(tuple(requests), inputs, slots, is_replay=recorded is not None))

    def _open(self, step: Step) -> Step:
        self._step, self._appended, self._slots = step, set(), {}
        return step

    def _end(self, step: Step) -> None:
        try:
            if not step.is_replay:
                self._check_appended()
                self._backend.end_step()
            self._check_outcome()
        except BaseException:
            self._undo(step)
            raise
        for request in step.requests:
            request.length += 1
            request.staged = [request.length] * self._layout.num_layers

    def _undo(self, step: Step) -> None:
        """Free the slots that the step's new records took; the records themselves never counted."""
        self._backend.end_step()
        self._backend.release(step.rows)
        self._backend.step_number, self._failed_before = self._backend.outcome()

    def _check_appended(self) -> None:
        missing = set(range(self._layout.num_layers)) - self._appended
        if missing:
            raise ValueError(
                f"the step ended without `append` for layers {sorted(missing)}: every layer needs its record"
            )

    def _check_outcome(self) -> None:
        number, all_failed = self._backend.outcome()
        failed = all_failed - self._failed_before
        if number != self._backend.step_number:
            times = number - self._backend.step_number + 1
            raise ValueError(f"the recorded step's graph was replayed {times} times inside the step, not once")
        if failed:
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


def _lines_for(requests: Sequence[CacheRequest], batch_size: int | None, recorded: Step | None) -> int:
    if batch_size is not None and recorded is not None:
        raise ValueError("a recorded step has its batch size: give one of batch_size and recorded")
    size = recorded.batch_size if recorded is not None else len(requests) if batch_size is None else batch_size
    if size < len(requests):
        raise ValueError(f"a step of batch size {size} has no room for {len(requests)} requests")
    return size


def _new_inputs(batch_size: int, device: torch.device) -> Tensor:
    """Room for the inputs of a step."""
    return torch.empty(NUM_INPUTS, batch_size, dtype=torch.int64, device=device)


def _upload(requests: Sequence[CacheRequest], inputs: Tensor) -> None:
    """Fill a step's inputs: one copy, which does not wait for the device."""
    lines = [_line(request) for request in requests]
    lines += [(-1, 0, 0, -1)] * (inputs.shape[1] - len(lines))
    values = torch.tensor(lines, device="cpu").t().contiguous()
    if inputs.device.type == "cuda":
        values = values.pin_memory()  # torch keeps the pinned block until the copy is done
    inputs.copy_(values, non_blocking=True)


def _line(request: CacheRequest) -> tuple[int, int, int, int]:
    position = request.length
    row = request.pages[position // PAGE_RECORDS] * PAGE_RECORDS + position % PAGE_RECORDS
    return request.index, position, position + 1, row
