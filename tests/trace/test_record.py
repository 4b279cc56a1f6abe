"""Recording: what is in the file is what the cache was asked for, step by step, of the requests that are sampled."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from hisparse.admission import CacheRequest
from hisparse.config import HiSparseConfig
from hisparse.engine import Engine, SamplingParams, build_engine
from hisparse.ranking import Best
from hisparse.step import Step
from hisparse.trace import open_trace
from hisparse.trace.file import TraceFile
from hisparse.trace.format import Header
from hisparse.trace.record import BLOCK_STEPS, TraceRecorder, numbered, record_traces, stop_recording
from tests.caches import new_driver, pad
from tests.engine.engines import Tiny, prompt_of

K = 8


def engine_of(tiny: Tiny, selector: str = "attention_mass", requests: int = 3) -> Engine:
    config = HiSparseConfig(top_k=K if selector != "quest" else 16, selector=selector, prefill_chunk=64)
    return build_engine(tiny.loaded, config, [200] * requests)


class Heard:
    """An observer that keeps what it hears, beside a recorder."""

    def __init__(self, recorder: TraceRecorder) -> None:
        self.recorder = recorder
        self.selections: dict[int, list[Tensor]] = {}  # of the first line, by layer
        self.positions: list[int] = []

    def hears(self, requests: Sequence[CacheRequest]) -> bool:
        return self.recorder.hears(requests)

    def selected(self, layer: int, selection: Tensor, step: Step, best: Best | None) -> None:
        self.recorder.selected(layer, selection, step, best)
        self.selections.setdefault(layer, []).append(selection[0].clone())
        if not layer:
            self.positions.append(int(step.positions[0]))


def test_a_request_is_recorded(tiny: Tiny, tmp_path: Path) -> None:
    engine = engine_of(tiny, requests=1)
    recorder = record_traces(engine, numbered(tmp_path / "t.hst"), num_ranked=4 * K, about={"source": "a test"})
    heard = Heard(recorder)
    engine.runner.cache.observer = heard
    engine.submit(prompt_of(90), SamplingParams(max_tokens=BLOCK_STEPS + 9))
    engine.run()
    stop_recording(engine, recorder)
    assert engine.runner.cache.observer is None
    assert recorder.paths == [tmp_path / "t.hst"]
    with TraceFile(recorder.paths[0]) as file:
        steps = file.read()
        assert file.header.about["source"] == "a test"
        assert file.header.about["selector"] == "AttentionMass"
    assert steps.newest.tolist() == heard.positions == list(range(90, 90 + BLOCK_STEPS + 8))
    for layer, selections in heard.selections.items():
        assert np.array_equal(steps.selection[:, layer], torch.stack(selections).numpy())
    assert steps.ranked is not None
    assert steps.scores is not None
    assert np.array_equal(np.sort(steps.ranked[..., :K]), steps.selection)
    assert (np.diff(steps.scores.astype(np.float32)) <= 0).all()
    assert open_trace(recorder.paths[0]).runners_up is not None


def test_some_requests_are_sampled(tiny: Tiny, tmp_path: Path) -> None:
    engine = engine_of(tiny, "quest")
    recorder = record_traces(engine, numbered(tmp_path / "t.hst"), every=2, max_steps=5)
    for length in (40, 50, 60):
        engine.submit(prompt_of(length), SamplingParams(max_tokens=4 if length == 40 else 12))
    engine.run()
    stop_recording(engine, recorder)
    assert recorder.paths == [tmp_path / "t.hst", tmp_path / "t-2.hst"]
    first, second = (TraceFile(path).read() for path in recorder.paths)
    assert first.newest.tolist() == [40, 41, 42]
    assert second.newest.tolist() == [60, 61, 62, 63, 64]
    assert (first.selection >= 0).any(axis=-1).all()


def test_numbers_that_cannot_be(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="those of at least k = 8, got 7"):
        record_traces(engine_of(tiny), numbered(tmp_path / "t.hst"), num_ranked=7)
    with pytest.raises(ValueError, match="every and max_steps must be at least 1, got 0 and None"):
        record_traces(engine_of(tiny), numbered(tmp_path / "t.hst"), every=0)


def test_a_step_that_is_undone_is_not_recorded(tmp_path: Path) -> None:
    driver = new_driver()
    cache = driver.cache
    recorder = TraceRecorder(Header((0, 1), 4), numbered(tmp_path / "t.hst"))
    cache.observer = recorder
    request = driver.admit(staged=10)
    driver.step({request: [3, 1]})
    with suppress(InterruptedError), cache.step([request]) as step:
        driver.append(step)
        cache.resolve(0, pad([[7]]))
        cache.resolve(1, pad([[7]]))
        raise InterruptedError
    driver.step({request: [-1, 9, 2, 5]})
    recorder.close()
    steps = TraceFile(recorder.paths[0]).read()
    assert steps.newest.tolist() == [10, 11]
    assert steps.selection[:, 1].tolist() == [[1, 3, -1, -1], [2, 5, 9, -1]]


def test_a_file_is_closed_when_its_request_retires(tmp_path: Path) -> None:
    driver = new_driver()
    recorder = TraceRecorder(Header((0, 1), 4), numbered(tmp_path / "t.hst"))
    driver.cache.observer = recorder
    first, second = driver.admit(staged=5), driver.admit(staged=7)
    driver.step({first: [1], second: [2]})
    driver.cache.retire(first)
    driver.step({second: [6]})
    assert TraceFile(recorder.paths[0]).read().selection[0, 0].tolist() == [1, -1, -1, -1]
    assert TraceFile(recorder.paths[1]).num_steps == 0
    recorder.close()
    assert TraceFile(recorder.paths[1]).num_steps == 2


def test_a_disk_that_is_full_ends_the_recording_and_not_the_step(tmp_path: Path) -> None:
    driver = new_driver()
    recorder = TraceRecorder(Header((0, 1), 4), numbered(tmp_path / "no" / "t.hst"))
    driver.cache.observer = recorder
    request = driver.admit(staged=5)
    driver.step({request: [1]})
    driver.step({request: [2]})
    driver.cache.check_integrity()
    assert isinstance(recorder.failure, FileNotFoundError)
    with pytest.raises(FileNotFoundError):
        recorder.close()
