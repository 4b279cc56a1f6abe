"""The sweep's points and parts, and its figure."""

import builtins
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from hisparse.bench import sweep_figure
from hisparse.bench.resolve_sweep import BATCH, BUFFER, panel, points, split
from hisparse.bench.synth import SETTINGS, Setting
from hisparse.bench.trace import generated
from hisparse.errors import HiSparseError
from tests.bench.results import RESULT, sweep_lines


def test_points_of_the_papers_figure() -> None:
    panels = points(generated("high", SETTINGS["high"]))
    assert [point for point in panels if BUFFER in panels[point]] == [
        (2049, 16), (3072, 16), (4096, 16), (6144, 16), (8192, 16),
    ]  # fmt: skip
    assert [point for point in panels if BATCH in panels[point]] == [(4096, batch) for batch in (1, 2, 4, 8, 16, 32)]
    assert panels[4096, 16] == [BATCH, BUFFER]


def test_points_of_small_traces() -> None:
    eight = points(generated("eight", Setting(10, 8, 160, 7600, 0.1)))
    assert {batch for (_, batch), names in eight.items() if BUFFER in names} == {8}
    assert {batch for (_, batch), names in eight.items() if BATCH in names} == {1, 2, 4, 8}
    assert {batch for _, batch in points(generated("three", Setting(10, 3, 160, 7600, 0.1)))} == {1, 2, 3}
    assert set(points(generated("one", Setting(10, 1, 1, 10, 0.1)))) == {(2, 1), (3, 1), (4, 1)}
    chosen = points(generated("eight", Setting(10, 8, 160, 7600, 0.1)), batch=4)
    assert {batch for (_, batch), names in chosen.items() if BUFFER in names} == {4}


def test_parts_sum_to_the_call() -> None:
    parts = split(RESULT)
    assert parts == {"us_io": 95.49, "us_probe": 6.25, "us_rest": 4.0}
    assert sum(parts.values()) == pytest.approx(RESULT["us"])


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_figure_is_written(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"sweep{suffix}"
    sweep_figure.draw(sweep_lines(), path)
    if suffix == ".png":
        height, width = imread(path).shape[:2]
        assert (width, height) == (1760, 832)
    else:
        assert "<svg" in path.read_text(encoding="utf-8")


def test_bars_add_up_to_the_times(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn: list[Any] = []
    bars = sweep_figure._bars

    def keep(axes: Any, *rest: Any) -> None:
        bars(axes, *rest)
        drawn.append(axes)

    monkeypatch.setattr(sweep_figure, "_bars", keep)
    sweep_figure.draw(sweep_lines(), tmp_path / "sweep.png")
    for axes, name in zip(drawn, (BUFFER, BATCH), strict=True):
        wanted = [line["us"] for line in panel(sweep_lines(), name)]
        tops = [sum(bar.get_height() for bar in stack) for stack in zip(*axes.containers, strict=True)]
        assert tops == pytest.approx(wanted)
        assert [text.get_text() for text in axes.texts] == [f"{us:.1f}" for us in wanted]


def test_where_a_figure_cannot_go(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must be a .png or .svg file, got 'sweep.pdf'"):
        sweep_figure.check_figure(Path("sweep.pdf"))
    with pytest.raises(ValueError, match="does not exist or cannot be written: make it first"):
        sweep_figure.check_figure(tmp_path / "missing" / "sweep.png")


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError("No module named 'matplotlib'")
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(HiSparseError, match=r"pip install 'hisparse\[bench\]'"):
        sweep_figure.check_figure(Path("sweep.png"))
