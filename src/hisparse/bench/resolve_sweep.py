"""The paper's Figure 7 on this machine: a resolve's time in parts, over the reservation and over the batch.

The parts of a call are differences of three graphs: IO is what the fetch adds to the tables' work (what of it is
exposed, for copies overlap claims); probe is what looking up and claiming adds to launches that have nothing to
do; the rest is those launches. sweep_figure.py draws what comes out here.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from hisparse.bench.resolve import bench
from hisparse.bench.resolve_setup import Setup
from hisparse.bench.trace import SelectionTrace

RATIOS = (1.5, 2, 3, 4)  # B / k, after the tightest: k + 1
SWEEP_BATCHES = (1, 2, 4, 8, 16, 32)
BUFFER_PANEL_BATCHES = (16, 8)  # of the panel over B / k: the first that the trace allows
BUFFER, BATCH = "buffer", "batch"  # the panels

Point = tuple[int, int]  # B, batch


def points(trace: SelectionTrace, batch: int | None = None) -> dict[Point, list[str]]:
    """What is measured, by ascending B, and the panels that a point belongs to.

    Args:
        trace: says k, and how many requests there are.
        batch: of the panel over B / k. Default: 16, or what of 8 and the trace's own it allows.
    """
    fixed = batch or next((size for size in BUFFER_PANEL_BATCHES if size <= trace.batch), trace.batch)
    buffers = sorted({trace.k + 1, *(max(int(ratio * trace.k), trace.k + 1) for ratio in RATIOS)})
    wanted = [((buffer, fixed), BUFFER) for buffer in buffers]
    wanted += [((twice(trace.k), size), BATCH) for size in SWEEP_BATCHES if size <= trace.batch]
    panels: dict[Point, list[str]] = {}
    for point, panel in sorted(wanted):
        panels.setdefault(point, []).append(panel)
    return panels


def sweep(setup: Setup, batch: int | None = None) -> Iterator[dict[str, Any]]:
    """One result a point; the setup's own B does not count.

    Raises:
        BuildError, HiSparseError, ValueError: as `bench`.
    """
    panels = points(setup.trace, batch)
    for buffer in sorted({buffer for buffer, _ in panels}):
        batches = [size for of_buffer, size in panels if of_buffer == buffer]
        for result in bench(replace(setup, buffer=buffer), batches):
            point = (buffer, result["batch"])
            yield {"kind": "sweep", "panels": panels[point], **result, **split(result)}


def split(result: Mapping[str, Any]) -> dict[str, float]:
    """A call's parts, which sum to `us`."""
    return {
        "us_io": round(result["us"] - result["us_no_io"], 2),
        "us_probe": round(result["us_no_io"] - result["us_launch"], 2),
        "us_rest": result["us_launch"],
    }


def panel(lines: Iterable[Mapping[str, Any]], name: str) -> list[Mapping[str, Any]]:
    """A panel's lines, in the order of its axis."""
    axis = {BUFFER: "buffer", BATCH: "batch"}[name]
    return sorted((line for line in lines if name in line["panels"]), key=lambda line: line[axis])


def twice(k: int) -> int:
    """The usual reservation; k + 1 is the least."""
    return max(2 * k, k + 1)
