"""Draw what resolve_sweep.py measured: stacked bars over B / k (left) and over the batch (right)."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hisparse.bench.resolve_sweep import BATCH, BUFFER, panel
from hisparse.errors import HiSparseError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg")
# Okabe and Ito's colours, which all kinds of colour vision tell apart; the lightness differs too, for grey prints
PARTS = (
    ("us_rest", "rest: launch and barrier", "#BBBBBB"),
    ("us_probe", "probe: look up and claim", "#E69F00"),
    ("us_io", "IO: fetch over the link", "#0072B2"),
)
UNDER_TICKS = "misses, % of the selection\nprobe + rest, microseconds"
DOTS_PER_INCH = 160


def check_figure(path: Path) -> None:
    """Whether a figure can be written there, before anything is measured.

    Raises:
        ValueError: another suffix, or no such folder.
        HiSparseError: matplotlib is missing.
    """
    if path.suffix not in SUFFIXES:
        raise ValueError(f"the figure must be a {' or '.join(SUFFIXES)} file, got {str(path)!r}")
    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"the figure's folder {str(path.parent)!r} does not exist or cannot be written: make it first")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise HiSparseError(f"figures need matplotlib ({error}): pip install 'hisparse[bench]'") from error


def draw(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the figure of a sweep's lines.

    Raises:
        ValueError, HiSparseError: as `check_figure`.
    """
    check_figure(path)
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(11, 5.2), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08, wspace=0.02))
    left, right = figure.subplots(1, 2)
    over_buffer, over_batch = panel(lines, BUFFER), panel(lines, BATCH)
    _bars(left, over_buffer, [_ratio(line) for line in over_buffer])
    _bars(right, over_batch, [f"{line['batch']}" for line in over_batch])
    left.set_title(f"over the reservation B, batch {over_buffer[0]['batch']}")
    left.set_xlabel(f"B / k\n{UNDER_TICKS}")
    left.set_ylabel("microseconds a resolve call")
    right.set_title(f"over the batch, B = {_ratio(over_batch[0])} k = {over_batch[0]['buffer']:,}")
    right.set_xlabel(f"batch\n{UNDER_TICKS}")
    figure.suptitle("Where the time of a resolve goes", fontsize=14, fontweight="bold", x=0.012, ha="left")
    figure.legend(*_labels(left), loc="outside upper right", ncols=len(PARTS), frameon=False)
    figure.supxlabel(_footer(over_buffer[0]), fontsize=8, color="#555555", x=0.012, ha="left")
    figure.savefig(path, dpi=DOTS_PER_INCH)


def _bars(axes: "Axes", lines: Sequence[Mapping[str, Any]], ticks: Sequence[str]) -> None:
    places = range(len(lines))
    bottom = [0.0] * len(lines)
    for key, label, colour in PARTS:
        heights = [max(line[key], 0.0) for line in lines]  # noise can make a difference of nearly equals negative
        axes.bar(places, heights, 0.68, bottom, label=label, color=colour, edgecolor="white", linewidth=0.6)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    for place, top, line in zip(places, bottom, lines, strict=True):
        axes.annotate(f"{line['us']:.1f}", (place, top), (0, 3), textcoords="offset points", ha="center", fontsize=9)
    axes.set_xticks(list(places), [_under(tick, line) for tick, line in zip(ticks, lines, strict=True)])
    axes.set_ylim(0, 1.12 * max(bottom))
    axes.spines[["top", "right"]].set_visible(False)
    axes.yaxis.grid(visible=True, color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)


def _labels(axes: "Axes") -> tuple[list[Any], list[str]]:
    """The legend's, in the order of a stack from above."""
    handles, labels = axes.get_legend_handles_labels()
    return handles[::-1], labels[::-1]


def _ratio(line: Mapping[str, Any]) -> str:
    """B / k."""
    return "(k + 1) / k" if line["buffer"] == line["k"] + 1 else f"{line['buffer'] / line['k']:.3g}"


def _under(tick: str, line: Mapping[str, Any]) -> str:
    """A tick with what the bars are too small to show."""
    return f"{tick}\n{100 * line['miss_rate']:.1f} %\n{line['us_probe']:.1f} + {line['us_rest']:.1f}"


def _footer(line: Mapping[str, Any]) -> str:
    return (
        f"{line['device']}, driver {line['driver']}, commit {line['commit'] or 'unknown'}; trace {line['trace']}, "
        f"k = {line['k']}, {line['record_bytes']} B records, {line['layers']} layers, {line['policy']}; "
        f"means over a CUDA graph"
    )
