"""`hisparse bench resolve` as a user without a GPU meets it."""

from pathlib import Path

import pytest
import torch

from hisparse.bench import synth
from hisparse.commands.main import main


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(setting: synth.Setting) -> None:
        raise AssertionError("a trace was made, and there is no GPU to replay it on")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(synth.Setting, "make", make)


def failure(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that a failing command leaves."""
    with pytest.raises(SystemExit) as left:
        main(["bench", "resolve", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert left.value.code == 2
    assert not out
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    "arguments", [(), ("--json",), ("--trace", "high", "--batch", "1,4", "--batch", "32"), ("--sweep",)]
)
def test_no_gpu(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    assert "no usable NVIDIA GPU: torch.cuda.is_available() is False" in failure(capsys, *arguments)


def test_a_recorded_trace_is_accepted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import numpy as np

    np.savez(tmp_path / "real.npz", delta=np.ones((6, 3, 2, 16), np.uint16))
    real = ("--trace", tmp_path / "real.npz", "--requests", 8, "--buffer", 32, "--exact-misses", "--warm-steps", 0)
    assert "no usable NVIDIA GPU" in failure(capsys, *real, "--trace-layer", 2)
    assert "no usable NVIDIA GPU" in failure(capsys, *real, "--trace-layer", "0,2")
    assert "layers must be 2, those of the trace, got 16" in failure(
        capsys, *real, "--trace-layer", "0,2", "--layers", 16
    )
    assert "choose with --trace-layer" in failure(capsys, *real)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--buffer", 2048), "ask for at least 2049"),
        (("--record-bytes", 100), "record_bytes must be a multiple of 16"),
        (("--batch", "1,x"), "--batch must be whole numbers, '1,4' for instance, got 'x'"),
        (("--batch", 17), "from 1 to 16, the requests of the trace, got 17"),
        (("--layers", 0), "num_layers must be a positive whole number"),
        (("--policy", "best"), "policy must be one of"),
        (("--trace", "missing.npy"), "cannot be read: No such file"),
        (("--steps", 2, "--warm-steps", 1), "warm_steps must be from 0 to 0"),
        (("--figure", "a.png"), "add --sweep"),
        (("--sweep", "--figure", "a.pdf"), "must be a .png or .svg file"),
        (("--sweep", "--batch", "1,2"), "at most one --batch"),
        (("--sweep", "--buffer", 4096), "leave out --buffer"),
    ],
)
def test_wrong_options(capsys: pytest.CaptureFixture[str], arguments: tuple[object, ...], message: str) -> None:
    assert message in failure(capsys, *arguments)
