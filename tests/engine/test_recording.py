"""Recorded decode steps as the runner drives them, and those that cannot be recorded: nobody loses a token."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from hisparse.checkpoint import load
from hisparse.checkpoint.tiny import write_tiny
from hisparse.checkpoint.tiny_mla import write_tiny_mla
from hisparse.config import HiSparseConfig
from hisparse.engine import Engine, SamplingParams, build_engine
from hisparse.engine.runner import RecordedStep, Runner
from hisparse.step import Step
from hisparse.trace import open_trace
from hisparse.trace.record import numbered, record_traces, stop_recording
from tests.engine.engines import VerifiedRun, assert_clean, prompt_of

CONFIG = HiSparseConfig(top_k=32, device_buffer_size=64)
PARAMS = SamplingParams(max_tokens=8, temperature=0.0)


def answer(engine: Engine) -> list[int]:
    request = engine.submit(prompt_of(50), PARAMS)
    engine.run()
    return request.output


def test_a_failing_recording_costs_nothing_but_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(write_tiny(tmp_path))
    want = answer(build_engine(loaded, CONFIG, [100]))
    engine = build_engine(loaded, CONFIG, [100])
    tried = []

    def record(runner: Runner, size: int) -> None:
        tried.append(size)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Runner, "_record", record)
    engine.runner._records = True
    with pytest.warns(UserWarning, match=r"not recorded from now on.*one of 1 requests.*out of memory.*cuda_graph"):
        assert answer(engine) == want
    assert tried == [1]
    assert answer(engine) == want
    assert tried == [1]
    assert_clean(engine)


def test_warming_up_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine(load(write_tiny(tmp_path)), CONFIG, [100, 100])
    tried: list[int] = []
    monkeypatch.setattr(Runner, "_try_to_record", lambda runner, size: tried.append(size))
    engine.runner.warm_up((1, 2))
    assert tried == []  # nothing is recorded on a CPU
    engine.runner._records = True
    engine.runner.warm_up((1, 2))
    assert tried == [1, 2]
    assert_clean(engine)


class PlayedGraph:
    """What a recorded step's graph does, done by the reference backend when it is replayed."""

    def __init__(self, runner: Runner, size: int) -> None:
        self._runner = runner
        inputs = runner.cache._steps._recorded_inputs[:, :size]
        self.step = Step((), inputs, torch.zeros(0))
        self.logits = torch.full((size, runner.model.config.vocab_size), torch.nan)
        self.num_replays = 0

    @torch.inference_mode()
    def replay(self) -> None:
        steps, family = self._runner.cache._steps, self._runner.family
        replayed = steps._step
        assert replayed is not None
        assert replayed.is_replay
        step = steps._open(Step((), self.step.inputs, steps._insert(self.step.inputs)))
        self.logits.copy_(self._runner.model.logits(family.forward_step(self._runner.cache, step, step.tokens)))
        self._runner.cache.backend.end_step()
        steps._open(replayed)
        self.num_replays += 1


@pytest.mark.parametrize("kind", ["llama", "glm-5.2"])
def test_replayed_steps_equal_resident_ones(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How the runner drives recorded steps: inputs, padding, what comes back; mixed with steps that are not."""
    folder = write_tiny(tmp_path) if kind == "llama" else write_tiny_mla(tmp_path, kind, top_k=32)
    graphs: dict[int, PlayedGraph] = {}

    def record(runner: Runner, size: int) -> RecordedStep:
        graphs[size] = PlayedGraph(runner, size)
        return RecordedStep(cast(Any, graphs[size]), graphs[size].step, graphs[size].logits)

    monkeypatch.setattr(Runner, "_record", record)
    run = VerifiedRun(replace(load(folder), stop_token_ids=()), CONFIG, [300] * 6)
    run.engine.runner._records = True
    run.engine.scheduler.buckets = (2, 4)
    for length in (30, 200, 77, 90, 150, 10):
        run.submit(length, max_tokens=8 + length % 7)
    for _ in range(12):
        run.step()
    run.engine.retract(run.engine.scheduler.running[0])
    run.finish()
    assert sum(graph.num_replays for graph in graphs.values()) == len(run.record.decodes) - 2
    assert any(batch.padding for batch in run.record.decodes)


def test_traces_are_whole_although_other_steps_are_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[PlayedGraph] = []

    def record(runner: Runner, size: int) -> RecordedStep:
        graphs.append(PlayedGraph(runner, size))
        return RecordedStep(cast(Any, graphs[-1]), graphs[-1].step, graphs[-1].logits)

    monkeypatch.setattr(Runner, "_record", record)
    loaded = replace(load(write_tiny(tmp_path / "model")), stop_token_ids=())
    engine = build_engine(loaded, replace(CONFIG, max_running_requests=2), [100] * 4)
    engine.runner._records = True
    engine.scheduler.buckets = (2,)
    recorder = record_traces(engine, numbered(tmp_path / "t.hst"), every=2)
    for length in (20, 30, 40, 50):  # the first and the third are recorded, the others run on alone
        engine.submit(prompt_of(length), replace(PARAMS, max_tokens=5 if length % 20 else 15))
    engine.run()
    stop_recording(engine, recorder)
    assert [open_trace(path).newest.tolist() for path in recorder.paths] == [[*range(20, 34)], [*range(40, 54)]]
    assert not graphs  # every step had a recorded request
    again = record_traces(engine, numbered(tmp_path / "u.hst"), every=3)
    for length in (20, 30, 40):
        engine.submit(prompt_of(length), replace(PARAMS, max_tokens=5 if length == 20 else 15))
    engine.run()
    stop_recording(engine, again)
    assert [open_trace(path).newest.tolist() for path in again.paths] == [[*range(20, 24)]]
    assert graphs[0].num_replays > 5


def test_a_replay_that_fails_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine(load(write_tiny(tmp_path)), CONFIG, [100])
    graphs: list[PlayedGraph] = []

    def record(runner: Runner, size: int) -> RecordedStep:
        graphs.append(PlayedGraph(runner, size))
        return RecordedStep(cast(Any, graphs[0]), graphs[0].step, graphs[0].logits)

    monkeypatch.setattr(Runner, "_record", record)
    engine.runner._records = True
    request = engine.submit(prompt_of(50), SamplingParams(max_tokens=8))
    for _ in range(3):
        engine.step()
    assert graphs[0].num_replays == 1
    before = list(request.output)
    with monkeypatch.context() as patch:
        patch.setattr(graphs[0], "replay", lambda: None)  # the graph did nothing
        with pytest.raises(ValueError, match="0 new records came to the cache in a step of 1 requests"):
            engine.step()
    assert request.output == before
    engine.run()
    assert request.output == answer(build_engine(load(tmp_path), CONFIG, [100]))
    assert_clean(engine)


@pytest.mark.gpu
def test_warm_steps_are_replayed(tmp_path: Path) -> None:
    loaded = load(write_tiny(tmp_path), dtype=torch.bfloat16, device="cuda")
    engine = build_engine(loaded, CONFIG, [100, 100])
    engine.runner.warm_up(engine.scheduler.buckets)
    assert set(engine.runner._recorded) == {1, 2}
    assert answer(engine) == answer(build_engine(loaded, CONFIG, [100, 100]))
    assert_clean(engine)
