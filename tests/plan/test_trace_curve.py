"""A trace's own miss rates in the place of the paper's."""

from pathlib import Path

import numpy as np
import pytest

from hisparse.plan.trace_curve import LOWEST_RATE, curve_of_trace


def write_trace(path: Path, selection: np.ndarray) -> Path:
    np.save(path, selection.astype(np.int32))
    return path


def test_rates_are_counted_after_the_first_sixth(tmp_path: Path) -> None:
    steps, k = 60, 4
    around = np.arange(steps * k).reshape(steps, 1, k) % 12  # twelve positions in turn, which 3k = 12 slots hold
    curve = curve_of_trace(write_trace(tmp_path / "turns.npy", around), "lru", (2, 3, 4))
    assert curve.points == ((2.0, 1.0), (3.0, LOWEST_RATE), (4.0, LOWEST_RATE))
    assert curve.source == "lru on the trace turns (k 4, 60 steps)"


def test_it_is_the_policys(tmp_path: Path) -> None:
    drawn = np.random.default_rng(0).random((120, 2, 200)).argsort(axis=-1)[..., :16]
    path = write_trace(tmp_path / "random.npy", np.sort(drawn, axis=-1))
    lru, belady = (curve_of_trace(path, policy, (2, 4)).rate(2) for policy in ("lru", "belady"))
    assert belady < lru < 1


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"missing\.npy cannot be read"):
        curve_of_trace(tmp_path / "missing.npy", "lru", (2, 4))
