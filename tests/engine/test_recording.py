"""A decode step that cannot be recorded is run all the same, and nobody loses a token."""

from pathlib import Path

import pytest
import torch

from hisparse.checkpoint import load
from hisparse.checkpoint.tiny import write_tiny
from hisparse.config import HiSparseConfig
from hisparse.engine import Engine, SamplingParams, build_engine
from hisparse.engine.runner import Runner
from tests.engine.engines import assert_clean, prompt_of

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


@pytest.mark.gpu
def test_warm_steps_are_replayed(tmp_path: Path) -> None:
    loaded = load(write_tiny(tmp_path), dtype=torch.bfloat16, device="cuda")
    engine = build_engine(loaded, CONFIG, [100, 100])
    engine.runner.warm_up(engine.scheduler.buckets)
    assert set(engine.runner._recorded) == {1, 2}
    assert answer(engine) == answer(build_engine(loaded, CONFIG, [100, 100]))
    assert_clean(engine)
