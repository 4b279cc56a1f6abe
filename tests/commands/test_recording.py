"""`hisparse serve --record-traces`: sampled requests of a running engine leave files; off, nothing is attached."""

from dataclasses import replace
from pathlib import Path

import pytest

from hisparse.checkpoint import load
from hisparse.checkpoint.tiny import write_tiny
from hisparse.commands.main import main
from hisparse.commands.recording import check_recording, recording
from hisparse.config import HiSparseConfig
from hisparse.engine import Engine, SamplingParams, build_engine
from hisparse.trace import open_trace


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    loaded = load(write_tiny(tmp_path / "model", "LlamaForCausalLM", num_layers=2))
    return build_engine(replace(loaded, stop_token_ids=()), HiSparseConfig(top_k=16), [80] * 2)


def test_every_second_request(engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    with recording(engine, folder, 2):
        for length in (40, 50, 60):
            engine.submit(list(range(length)), SamplingParams(max_tokens=6))
        engine.run()
    assert engine.runner.cache.observer is None
    traces = [open_trace(path) for path in sorted(folder.iterdir())]
    assert [trace.newest.tolist() for trace in traces] == [[40, 41, 42, 43, 44], [60, 61, 62, 63, 64]]
    assert traces[0].about["source"] == "server"
    assert "recorded 2 requests" in capsys.readouterr().err


def test_off_by_default(engine: Engine) -> None:
    with recording(engine, None, 1):
        assert engine.runner.cache.observer is None


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="--record-every must be at least 1, got 0"):
        check_recording(tmp_path, 0)
    pytest.importorskip("fastapi")
    with pytest.raises(SystemExit):
        main(["serve", "anything", "--record-traces", str(tmp_path / "no")])
    assert "is no folder that can be written to: make it first" in capsys.readouterr().err
