"""The figures are written; what is on them was looked at by eye."""

import builtins
from pathlib import Path
from typing import Any

import pytest

from hisparse.errors import HiSparseError
from hisparse.trace.plots import STYLES, check_target, choose_size, draw_report
from hisparse.trace.policies import SIMULATED
from hisparse.trace.report import make_report
from hisparse.trace.sweep import Sweep
from tests.trace.traces import drifting


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return make_report(drifting(), Sweep(("lru", "two_rate", "belady"), (12, 24), skip=10), workers=1)


def test_every_figure_in_every_format(report: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written = draw_report(report, tmp_path / "t")
    names = [f"t-{name}.{suffix}" for name in ("steps", "sizes", "layers", "locality") for suffix in ("png", "svg")]
    assert [path.name for path in written] == names
    assert all(path.stat().st_size > 5000 for path in written)


def test_a_trace_of_one_step_and_one_size(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = make_report(drifting(steps=1), Sweep(("lru",), (20,)), workers=1)
    assert len(draw_report(report, tmp_path / "t", ["png"])) == 4


def test_every_policy_is_told_from_every_other() -> None:
    assert set(STYLES) == set(SIMULATED)
    assert len({style.marker for style in STYLES.values()}) == len(STYLES)


def test_what_cannot_be_drawn(report: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_size(report, None) == 24
    with pytest.raises(ValueError, match="must be one of 12, 24, got 36"):
        choose_size(report, 36)
    with pytest.raises(ValueError, match="--format takes png and svg, got pdf"):
        check_target(tmp_path / "t", ["png", "pdf"])
    with pytest.raises(ValueError, match="does not exist or cannot be written"):
        check_target(tmp_path / "nowhere" / "t", ["png"])
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(HiSparseError, match=r"pip install 'hisparse\[bench\]'"):
        check_target(tmp_path / "t", ["png"])
