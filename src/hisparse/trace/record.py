"""Records what the layers of running requests select: an observer of the cache that writes trace files.

`record_traces` attaches it to an engine, of a command or of a server. It costs nothing while it is not attached, and
little for requests that are not among the recorded ones.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hisparse.admission import CacheRequest, State
from hisparse.cache import HierarchicalCache
from hisparse.ranking import Best
from hisparse.step import Step
from hisparse.trace.file import TraceWriter
from hisparse.trace.format import SUFFIX, Header, Steps
from hisparse.trace.trace import ascending

if TYPE_CHECKING:
    from hisparse.engine import Engine

BLOCK_STEPS = 64  # in one block of a file
MOST_RECORDED = 8  # requests recorded at one time

PathOf = Callable[[int], Path]  # the file of the n-th recorded request, from 0


@dataclass
class _Recording:
    """A request's file, and the steps that are not written yet."""

    writer: TraceWriter
    step: Step | None = None  # the one that is under way
    rows: dict[int, tuple[NDArray[Any], ...]] = field(default_factory=dict)  # its layers so far
    steps: list[tuple[int, list[tuple[NDArray[Any], ...]]]] = field(default_factory=list)


class TraceRecorder:
    """Writes a file for each recorded request. See `SelectionObserver`.

    Args:
        header: of every file.
        path_of: where the files go.
        every: record the first request and then every so-manieth one.
        max_steps: of a request; later ones are not recorded.

    Raises:
        ValueError: numbers below 1.
    """

    def __init__(
        self,
        header: Header,
        path_of: PathOf,
        *,
        every: int = 1,
        max_steps: int | None = None,
    ) -> None:
        if every < 1 or (max_steps is not None and max_steps < 1):
            raise ValueError(f"every and max_steps must be at least 1, got {every} and {max_steps}")
        self.header = header
        self.paths: list[Path] = []  # of the files begun
        self.failure: OSError | None = None  # what ended the recording
        self._path_of = path_of
        self._every = every
        self._max_steps = max_steps
        self._num_seen = 0
        self._known: dict[int, tuple[CacheRequest, _Recording | None]] = {}  # by identity
        self._current: Step | None = None
        self._recorded: list[tuple[int, _Recording]] = []  # lines of the current step

    def hears(self, requests: Sequence[CacheRequest]) -> bool:
        """See `SelectionObserver`: only steps with a recorded request need to be run as they are."""
        return self.failure is None and bool(self._guarded(self._hears, requests))

    def selected(self, layer: int, selection: Tensor, step: Step, best: Best | None) -> None:
        """See `SelectionObserver`. A step that is undone is not written: its position comes again.

        A file that cannot be written, on a full disk for instance, ends the recording and not the step: see `failure`.
        """
        if self.failure is None:
            self._guarded(self._record, layer, selection, step, best)

    def _guarded(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Whatever the call gives; None if it could not write."""
        try:
            return call(*arguments)
        except OSError as error:
            self.failure = error

    def _hears(self, requests: Sequence[CacheRequest]) -> bool:
        self._finish_step()
        self._forget_retired()
        recordings = [self._recording_of(request) for request in requests]  # all: they are counted as they come
        return any(recording is not None and not self._is_full(recording) for recording in recordings)

    def _record(self, layer: int, selection: Tensor, step: Step, best: Best | None) -> None:
        if step is not self._current:
            self._begin_step(step)
        if not self._recorded:
            return
        lines = [line for line, _ in self._recorded]
        parts = (_padded(selection[lines].cpu().numpy(), self.header.k), *self._ranks_of(lines, best))
        for place, (_, recording) in enumerate(self._recorded):
            recording.rows[layer] = tuple(part[place] for part in parts)

    def close(self) -> None:
        """Write what is left and close every file. Raises `OSError` if that fails, or failed before."""
        if self.failure is not None:
            raise self.failure
        self._finish_step()
        for _, recording in self._known.values():
            if recording is not None:
                _flush(recording)
                recording.writer.close()
        self._known.clear()

    def _begin_step(self, step: Step) -> None:
        self._finish_step()
        self._forget_retired()
        self._current = step
        for line, request in enumerate(step.requests):
            recording = self._recording_of(request)
            if recording is not None and not self._is_full(recording):
                recording.step, recording.rows = step, {}
                self._recorded.append((line, recording))

    def _finish_step(self) -> None:
        """Keep the step before, if every layer selected in it and it was not undone."""
        if self._current is None:
            return
        for line, recording in self._recorded:
            request = self._current.requests[line]
            newest = int(self._current.positions[line])
            if len(recording.rows) == len(self.header.layers) and request.length > newest:
                recording.steps.append((newest, [recording.rows[layer] for layer in self.header.layers]))
            recording.rows = {}
            if len(recording.steps) >= BLOCK_STEPS:
                _flush(recording)
        self._recorded, self._current = [], None

    def _recording_of(self, request: CacheRequest) -> _Recording | None:
        if id(request) not in self._known:
            self._known[id(request)] = (request, self._new_recording())
            self._num_seen += 1
        return self._known[id(request)][1]

    def _new_recording(self) -> _Recording | None:
        running = sum(recording is not None for _, recording in self._known.values())
        if self._num_seen % self._every or running >= MOST_RECORDED:
            return None
        path = self._path_of(len(self.paths))
        self.paths.append(path)
        return _Recording(TraceWriter(path, self.header))

    def _forget_retired(self) -> None:
        for key, (request, recording) in list(self._known.items()):
            if request.state is State.RETIRED:
                if recording is not None:
                    _flush(recording)
                    recording.writer.close()
                del self._known[key]

    def _is_full(self, recording: _Recording) -> bool:
        return self._max_steps is not None and recording.writer.num_steps + len(recording.steps) >= self._max_steps

    def _ranks_of(self, lines: list[int], best: Best | None) -> tuple[NDArray[Any], ...]:
        """Best positions and scores of these lines, or nothing."""
        if best is None or not self.header.num_ranked:
            return ()
        ranking = best(self.header.num_ranked)
        return ranking.positions[lines].cpu().numpy(), ranking.scores[lines].cpu().half().numpy()


def _flush(recording: _Recording) -> None:
    """Write the steps that are complete as one block."""
    steps, recording.steps = recording.steps, []
    if not steps:
        return
    newest = np.array([position for position, _ in steps], np.int32)
    kinds = range(len(steps[0][1][0]))
    parts = [np.array([[row[kind] for row in rows] for _, rows in steps]) for kind in kinds]  # [steps, layers, ...]
    recording.writer.write(Steps(newest, *parts))


def _padded(selection: NDArray[np.int32], k: int) -> NDArray[np.int32]:
    """[lines, k], ascending, pads at the end."""
    missing = k - selection.shape[-1]
    return ascending(np.pad(selection, ((0, 0), (0, missing)), constant_values=-1))


def record_traces(
    engine: "Engine",
    path_of: PathOf,
    *,
    every: int = 1,
    max_steps: int | None = None,
    num_ranked: int = 0,
    about: Mapping[str, Any] | None = None,
) -> TraceRecorder:
    """Record the requests that an engine will run, until the recorder is closed.

    Args:
        engine: whose cache is observed. Steps with a recorded request are not replayed from CUDA graphs meanwhile.
        path_of: where the file of the n-th recorded request goes.
        every: record the first request and then every so-manieth one.
        max_steps: of a request.
        num_ranked: best positions to keep with their scores, at least k.
        about: what else to say in the file.

    Raises:
        ValueError: numbers below 1, or fewer scores than k.
    """
    cache = engine.runner.cache
    header = Header(_selecting_layers(cache), cache.layout.top_k, num_ranked, _about(engine, about or {}))
    recorder = TraceRecorder(header, path_of, every=every, max_steps=max_steps)
    cache.observer = recorder
    return recorder


def stop_recording(engine: "Engine", recorder: TraceRecorder) -> None:
    """Detach the recorder and close its files."""
    engine.runner.cache.observer = None
    recorder.close()


def _selecting_layers(cache: HierarchicalCache) -> tuple[int, ...]:
    """Layers of the cache that have a selection of their own."""
    return tuple(sorted(set(cache.layout.anchors)))


def _about(engine: "Engine", more: Mapping[str, Any]) -> dict[str, Any]:
    layout, model = engine.runner.cache.layout, engine.runner.model
    selector = getattr(engine.runner.family, "selector", None)
    return {
        "model": model.config.architecture,
        "selector": type(selector).__name__,
        "k": layout.top_k,
        "layers": layout.num_layers,
        "record_bytes": layout.record_bytes,
        "max_context": model.config.max_positions,
        **more,
    }


def numbered(path: Path) -> PathOf:
    """`name.hst`, then `name-2.hst` and so on."""

    def path_of(number: int) -> Path:
        return path if not number else path.with_name(f"{path.stem}-{number + 1}{path.suffix or SUFFIX}")

    return path_of
