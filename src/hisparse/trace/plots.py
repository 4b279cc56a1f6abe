"""Draw a report of `hisparse trace simulate`: four figures that read in black and white too.

Every policy has a line style and a marker of its own, whatever else is drawn with it; colours differ in lightness.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hisparse.errors import HiSparseError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg")
DOTS_PER_INCH = 110
GREY, GRID = "#555555", "#DDDDDD"
WINDOW = 20  # steps that a curve over steps is smoothed by

Report = Mapping[str, Any]


class Style(NamedTuple):
    """How a policy is drawn."""

    colour: str
    line: str | tuple[int, tuple[float, ...]]
    marker: str


# Okabe and Ito's colours, which all kinds of colour vision tell apart
STYLES = {
    "fifo": Style("#999999", (0, (1, 1)), "v"),
    "random": Style("#999999", (0, (5, 1, 1, 1, 1, 1)), "x"),
    "lru": Style("#000000", "-", "o"),
    "lru_paper": Style("#000000", (0, (6, 2)), "P"),
    "clock": Style("#56B4E9", (0, (4, 1, 1, 1)), "<"),
    "sieve": Style("#CC79A7", (0, (3, 1)), ">"),
    "s3_fifo": Style("#009E73", (0, (2, 1)), "s"),
    "lfu": Style("#F0E442", (0, (7, 1, 1, 1)), "1"),
    "lru_2": Style("#56B4E9", (0, (8, 2, 2, 2)), "2"),
    "lrfu": Style("#E69F00", (0, (5, 2)), "h"),
    "lrfu_resident": Style("#E69F00", (0, (1, 2)), "H"),
    "two_rate": Style("#0072B2", "-", "^"),
    "two_rate_tier": Style("#0072B2", (0, (4, 2)), "D"),
    "two_rate_resident": Style("#CC79A7", (0, (6, 1, 2, 1)), "p"),
    "two_rate_resident_tier": Style("#CC79A7", (0, (1, 1)), "*"),
    "belady": Style("#D55E00", (0, (1, 1.5)), "d"),
}
FALLBACK = Style("#000000", "-", ".")


def draw_report(report: Report, prefix: Path, formats: Sequence[str] = FORMATS, size: int | None = None) -> list[Path]:
    """Write every figure of a report.

    Args:
        report: of `make_report`.
        prefix: of the files: `prefix-steps.png` and so on.
        formats: of `FORMATS`.
        size: B of the figures that show one; default: 2k if it was simulated, or else the first.

    Returns:
        The files written.

    Raises:
        ValueError: a format or a size that is not there, or a folder that cannot be written to.
        HiSparseError: matplotlib is missing.
    """
    check_target(prefix, formats)
    chosen = choose_size(report, size)
    figures: dict[str, Callable[[], Figure]] = {
        "steps": lambda: _over_steps(report, chosen),
        "sizes": lambda: _over_sizes(report),
        f"{report['line_name']}s": lambda: _over_lines(report, chosen),
        "locality": lambda: _locality(report),
    }
    written = []
    for name, make in figures.items():
        figure = make()
        for suffix in formats:
            written.append(prefix.with_name(f"{prefix.name}-{name}.{suffix}"))
            metadata = {"Date": None} if suffix == "svg" else {"Software": None}
            figure.savefig(written[-1], dpi=DOTS_PER_INCH, metadata=metadata)
    return written


def check_target(prefix: Path, formats: Sequence[str]) -> None:
    """Whether figures can be written there, before anything is simulated. Raises as `draw_report`."""
    unknown = [suffix for suffix in formats if suffix not in FORMATS]
    if unknown or not formats:
        raise ValueError(f"--format takes {' and '.join(FORMATS)}, got {', '.join(unknown) or 'none'}")
    folder = prefix.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(
            f"the figures' folder {str(prefix.parent)!r} does not exist or cannot be written: make it first"
        )
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise HiSparseError(f"figures need matplotlib ({error}): pip install 'hisparse[bench]'") from error


def choose_size(report: Report, size: int | None) -> int:
    """The size that a figure of one size shows. Raises `ValueError` for one that was not simulated."""
    sizes = list(dict.fromkeys(result["size"] for result in report["results"]))
    twice = 2 * int(report["k"])
    if size is None:
        return twice if twice in sizes else int(sizes[0])
    if size not in sizes:
        raise ValueError(f"the size to draw must be one of {', '.join(map(str, sizes))}, got {size}")
    return size


def _of_size(report: Report, size: int) -> list[Mapping[str, Any]]:
    return [result for result in report["results"] if result["size"] == size]


def _over_steps(report: Report, size: int) -> "Figure":
    figure, axes = _new(f"Misses over steps, {_size_name(report, size)}")
    labels: list[tuple[float, str]] = []
    for number, result in enumerate(_of_size(report, size)):
        rates = 100 * _smoothed(result["miss_rate_by_step"])
        start = report["skip"]
        steps = np.arange(len(rates))[start:]
        style = STYLES.get(result["policy"], FALLBACK)
        every = max(len(steps) // 8, 1)
        axes.plot(
            steps, rates[start:], color=style.colour, linestyle=style.line, marker=style.marker, markersize=5,
            markevery=(number * every // 6, every), linewidth=1.5, label=result["policy"],
        )  # fmt: skip
        labels.append((100 * result["miss_rate"], result["policy"]))
    _name_lines(axes, labels, "mean of all steps shown")
    axes.set_xlabel(f"decode step (each point is the mean of {WINDOW} steps)")
    axes.set_ylabel("misses, % of k")
    axes.set_ylim(bottom=0)
    _foot(figure, report)
    return figure


def _over_sizes(report: Report) -> "Figure":
    figure, axes = _new("Misses over the slots of a request and layer")
    k = report["k"]
    labels: list[tuple[float, str]] = []
    for policy in dict.fromkeys(result["policy"] for result in report["results"]):
        results = sorted((r for r in report["results"] if r["policy"] == policy), key=lambda r: int(r["size"]))
        style = STYLES.get(policy, FALLBACK)
        rates = [100 * result["miss_rate"] for result in results]
        axes.plot(
            [result["size"] / k for result in results], rates, color=style.colour, linestyle=style.line,
            marker=style.marker, markersize=6, linewidth=1.5, label=policy,
        )  # fmt: skip
        labels.append((rates[-1], policy))
    ratios = sorted({result["size"] / k for result in report["results"]})
    if len(ratios) > 1:
        axes.set_xscale("log", base=2)
    axes.set_xticks(ratios, [f"{ratio:.3g}" for ratio in ratios])
    axes.minorticks_off()
    axes.set_xlabel("B / k")
    axes.set_ylabel("misses, % of k")
    axes.set_ylim(bottom=0)
    _name_lines(axes, labels, f"at B = {ratios[-1]:.3g} k")
    _foot(figure, report)
    return figure


def _over_lines(report: Report, size: int) -> "Figure":
    results = _of_size(report, size)
    rates = 100 * np.array([result[f"miss_rate_by_{report['line_name']}"] for result in results])
    figure, axes = _new(
        f"Misses by {report['line_name']}, % of k, {_size_name(report, size)}", 1.9 + 0.42 * len(results)
    )
    image = axes.imshow(rates, cmap="Greys", aspect="auto", vmin=0, vmax=max(float(rates.max()), 1e-9))
    for row, column in np.ndindex(*rates.shape):
        dark = rates[row, column] > 0.55 * rates.max()
        if rates.shape[1] <= 40:
            text = f"{rates[row, column]:.0f}"
            axes.text(column, row, text, ha="center", va="center", fontsize=7, color="white" if dark else "black")
    axes.set_yticks(range(len(results)), [f"{r['policy']}  {100 * r['miss_rate']:.1f}" for r in results])
    numbers = report["line_numbers"]
    every = max(len(numbers) // 15, 1)
    axes.set_xticks(range(0, len(numbers), every), [str(number) for number in numbers[::every]])
    axes.set_xlabel(report["line_name"])
    axes.grid(visible=False)
    figure.colorbar(image, ax=axes, pad=0.01)
    _foot(figure, report)
    return figure


def _locality(report: Report) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    figure.suptitle("What selections have in common", fontsize=13, fontweight="bold", x=0.012, ha="left")
    left, middle, right = figure.subplots(1, 3)
    overlap = report["overlap"]
    if overlap:
        _draw_histogram(left, overlap)
        _draw_lines(middle, report, overlap)
        _draw_reuse(right, report)
    _foot(figure, report)
    return figure


def _draw_histogram(axes: "Axes", overlap: Mapping[str, Any]) -> None:
    counts = np.array(overlap["histogram"], float)
    width = 1 / len(counts)
    axes.bar(np.arange(len(counts)) * width + width / 2, 100 * counts / max(counts.sum(), 1), 0.9 * width, color=GREY)
    axes.axvline(overlap["mean"], color="black", linestyle="--", linewidth=1)
    axes.annotate(f"mean {overlap['mean']:.2f}", (overlap["mean"], 0.97), (-4, 0), xycoords=("data", "axes fraction"),
                  textcoords="offset points", ha="right", fontsize=9)  # fmt: skip
    _dress(axes, "share selected in the step before too", "% of selections")


def _draw_lines(axes: "Axes", report: Report, overlap: Mapping[str, Any]) -> None:
    name = report["line_name"]
    values = overlap[f"by_{name}"]
    axes.plot(report["line_numbers"], values, color="black", marker="o", markersize=4, linewidth=1)
    axes.set_ylim(0, 1)
    beside = report.get(f"{name}_overlap")
    if beside is not None and name == "layer":
        axes.axhline(beside, color=GREY, linestyle=":", linewidth=1.5)
        axes.text(0.03, 0.04, f"dotted: with the layer before, {beside:.2f}", transform=axes.transAxes, fontsize=9)
    _dress(axes, name, "share in the step before too")


def _draw_reuse(axes: "Axes", report: Report) -> None:
    total = sum(bar["count"] for bar in report["reuse"]) + report["first_uses"]
    names = [_span(*bar["steps"]) for bar in report["reuse"]] + ["never"]
    shares = [100 * bar["count"] / max(total, 1) for bar in report["reuse"]]
    shares.append(100 * report["first_uses"] / max(total, 1))
    places = np.arange(len(names))
    axes.bar(places, shares, 0.8, color=GREY)
    for place, share in zip(places, shares, strict=True):
        axes.annotate(f"{share:.1f}", (place, share), (0, 2), textcoords="offset points", ha="center", fontsize=8)
    axes.set_xticks(places, names, rotation=45, ha="right")
    _dress(axes, "steps since it was last selected", "% of selected positions")


def _span(first: int, last: int | None) -> str:
    return f"{first}+" if last is None else str(first) if first == last else f"{first}-{last}"


def _new(title: str, height: float = 4.8) -> "tuple[Figure, Axes]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, height), layout="constrained")
    figure.suptitle(title, fontsize=13, fontweight="bold", x=0.012, ha="left")
    axes = figure.subplots()
    _dress(axes)
    return figure, axes


def _dress(axes: "Axes", below: str = "", beside: str = "") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, axis="y", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel(below)
    axes.set_ylabel(beside)


def _name_lines(axes: "Axes", labels: Sequence[tuple[float, str]], title: str) -> None:
    """A legend beside the lines: each one's style, name and rate, the highest first."""
    by_name = {handle.get_label(): handle for handle in axes.get_legend_handles_labels()[0]}
    ordered = sorted(labels, reverse=True)
    axes.legend(
        [by_name[policy] for _, policy in ordered], [f"{policy}  {rate:.2f} %" for rate, policy in ordered],
        title=title, alignment="left", loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, handlelength=4,
    )  # fmt: skip


def _smoothed(rates: Sequence[float]) -> NDArray[np.float64]:
    """The mean of each step and those before it, `WINDOW` of them."""
    sums = np.concatenate([[0.0], np.cumsum(rates)])
    ends = np.arange(1, len(rates) + 1)
    starts = (ends - WINDOW).clip(min=0)
    means: NDArray[np.float64] = (sums[ends] - sums[starts]) / (ends - starts)
    return means


def _size_name(report: Report, size: int) -> str:
    return f"B = {size / report['k']:.3g} k = {size:,}"


def _foot(figure: "Figure", report: Report) -> None:
    about = report["about"]
    model = f"{about['model']}, " if "model" in about else ""
    text = (
        f"{report['trace']}: {model}k = {report['k']}, {report['lines']} {report['line_name']}s, "
        f"steps {report['skip']} to {report['steps'] - 1}"
    )
    figure.supxlabel(text, fontsize=8, color=GREY, x=0.012, ha="left")
