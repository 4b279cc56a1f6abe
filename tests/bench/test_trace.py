"""Traces from files and from the generator: what is read, and what a wrong one is told."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hisparse.bench.synth import SETTINGS, Setting
from hisparse.bench.trace import choose_trace, from_file
from hisparse.bench.trace_file import read_trace

GOOD = np.arange(2 * 3 * 4, dtype=np.int32).reshape(2, 3, 4)[..., ::-1].copy()
SMALL: dict[str, Any] = {"steps": 20, "requests": 2, "k": 8, "context": 50}


def saved(path: Path, *arrays: NDArray[Any], **named: Any) -> Path:
    if path.suffix == ".npy":
        np.save(path, arrays[0])
    else:
        np.savez(path, *arrays, **named)
    return path


def test_npy_and_npz(tmp_path: Path) -> None:
    for path in (
        saved(tmp_path / "a.npy", GOOD),
        saved(tmp_path / "b.npz", selection=GOOD),
        saved(tmp_path / "c.npz", trace=GOOD, other=GOOD[0]),
    ):
        trace = from_file(path)
        assert np.array_equal(trace.selections[:, 0], np.sort(GOOD))  # selections ascend
        assert (trace.name, trace.steps, trace.layers, trace.batch, trace.k) == (path.stem, 2, 1, 3, 4)
        assert trace.context == 24


def test_recorded_layers_are_tiled_to_requests(recorded: Path) -> None:
    trace = from_file(recorded, (2, 0), 5, 1000)
    assert trace.selections.shape == (6, 2, 5, 16)
    assert (trace.context, trace.batch, dict(trace.about)) == (1000, 5, {"trace_layers": [2, 0]})
    for request in range(5):
        assert trace.selections[4, 0, request].tolist() == [20 + 3 * entry for entry in range(16)]
        assert trace.selections[4, 1, request].tolist() == [20 + entry for entry in range(16)]


def test_one_request_is_tiled_and_several_are_not(tmp_path: Path) -> None:
    one, three = saved(tmp_path / "one.npy", GOOD[:, :1]), saved(tmp_path / "three.npy", GOOD)
    assert from_file(one, requests=4).selections.shape == (2, 1, 4, 4)
    assert from_file(three, requests=3).batch == 3
    with pytest.raises(ValueError, match=r"requests must be 3, those of .*, got 8$"):
        from_file(three, requests=8)
    with pytest.raises(ValueError, match=r"requests must be 1, .* got 0$"):
        from_file(one, requests=0)
    with pytest.raises(ValueError, match="at least 24, got 23"):
        from_file(three, context=23)


def negative(array: NDArray[np.int32]) -> NDArray[np.int32]:
    array[1, 2, 3] = -1
    return array


def repeated(array: NDArray[np.int32]) -> NDArray[np.int32]:
    array[0, 1, 3] = array[0, 1, 0]
    return array


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda array: array.astype(np.int64), r"must be int32 \[steps, batch, k\], none empty, got int64 \[2, 3, 4\]"),
        (lambda array: array[0], r"got int32 \[3, 4\]"),
        (lambda array: array[:, :0], r"got int32 \[2, 0, 4\]"),
        (negative, "got a negative -1 in step 1, request 2"),
        (repeated, "got a repeated 7 in step 0, request 1"),
        (lambda array: np.array([{"an": "object"}]), "not a whole .npy or .npz file of numbers"),
    ],
)
def test_wrong_arrays(tmp_path: Path, spoil: Callable[[Any], NDArray[Any]], message: str) -> None:
    for name in ("bad.npy", "bad.npz"):
        with pytest.raises(ValueError, match=message) as caught:
            read_trace(saved(tmp_path / name, spoil(GOOD.copy()), selection=spoil(GOOD.copy())))
        assert name in str(caught.value)
        assert "\n" not in str(caught.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    whole = saved(tmp_path / "whole.npz", selection=GOOD).read_bytes()
    for content in (b"", b"text", whole[:200], whole[:-40], np.lib.format.magic(1, 0)):
        path = tmp_path / "broken.npz"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"not a whole .npy or .npz file"):
            read_trace(path)
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        read_trace(tmp_path / "missing.npy")
    with pytest.raises(ValueError, match=r"'selection' or 'trace', .* it has pos, score"):
        read_trace(saved(tmp_path / "other.npz", score=GOOD, pos=GOOD))
    with pytest.raises(ValueError, match=r"uint16 \[steps, layers, bands, k\], none empty, got int32 \[2, 3, 4\]"):
        read_trace(saved(tmp_path / "delta.npz", delta=GOOD), (0,))


def test_layers_of_a_recorded_trace_must_be_chosen(recorded: Path, tmp_path: Path) -> None:
    for layers, came in (((), "none"), ((3,), "3"), ((0, 7), "0, 7")):
        with pytest.raises(ValueError, match=f"has layers 0 to 2: choose with --trace-layer, got {came}$"):
            read_trace(recorded, layers)
    with pytest.raises(ValueError, match="has no layers"):
        read_trace(saved(tmp_path / "plain.npy", GOOD), (0,))


def test_the_generator_takes_other_settings() -> None:
    trace = choose_trace("low", **SMALL, churn=0.5, seed=3)
    assert trace.name == "generated"
    assert dict(trace.about) == {"churn": 0.5, "seed": 3}
    assert trace.warm_steps == 2
    assert trace.selections.shape == (20, 1, 2, 8)
    assert np.array_equal(trace.selections[:, 0], np.sort(Setting(20, 2, 8, 50, 0.5, 3).make()))
    assert not np.array_equal(trace.selections, choose_trace("low", **SMALL, churn=0.5, seed=4).selections)


def test_named_settings_are_as_published() -> None:
    sizes = {name: (setting.steps, setting.batch, setting.context) for name, setting in SETTINGS.items()}
    assert sizes == {"low": (120, 16, 100_000), "low-wide": (60, 64, 40_000), "high": (60, 32, 100_000)}
    assert [choose_trace(name).warm_steps for name in SETTINGS] == [12, 6, 6]
    assert choose_trace("high").name == "high"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("lower", {}, "must be low, low-wide, high, or a .npy or .npz or .hst file, got 'lower'"),
        ("low", {"layers": (1,)}, "--trace-layer is for a recorded trace"),
        ("low", {"churn": 1.5}, "churn must be a share from 0 to 1, got 1.5"),
        ("low", {"context": 100}, "context must be at least k = 2048, for distinct positions, got 100"),
        ("low", {"steps": 0}, "steps of a generated trace must be at least 1, got 0"),
        ("low", {"requests": 0}, "requests of a generated trace must be at least 1, got 0"),
        ("some.npy", {"k": 12}, "--k is for a generated trace, and some.npy is a file"),
    ],
)
def test_options_that_do_not_fit(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_trace(name, **options)
