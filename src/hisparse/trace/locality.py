"""What a trace's selections have in common, whatever the policy: overlap of steps and of lines, and reuse distances."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hisparse.trace.trace import Trace

BINS = 20  # of the histogram of overlaps
REUSE_EDGES = (1, 2, 3, 5, 9, 17, 33, 65, 129)  # steps; the last one and all above are one bar


def locality(trace: Trace, skip: int = 0) -> dict[str, Any]:
    """Figures of a trace over the steps after the first `skip`.

    `overlap` is the share of a selection that the step before selected too, `line_overlap` that of the line before in
    the same step. `reuse` counts selected positions by the steps since they were last selected.
    """
    num_places = len(trace.occurring)
    place_of = np.full(trace.num_positions + 1, -1, np.int32)  # a pad's -1 is the last entry
    place_of[trace.occurring] = np.arange(num_places)
    last = np.full((trace.num_lines, num_places + 1), -1, np.int32)  # and the last column
    lines = np.arange(trace.num_lines)[:, None]
    kept, with_line_before, distances = [], [], np.zeros(len(REUSE_EDGES) + 1, np.int64)
    for step, positions in enumerate(trace.selection):
        places = place_of[positions]
        real = places >= 0
        before = last[lines, places]
        if step >= max(skip, 1):
            size = real.sum(axis=1).clip(min=1)
            kept.append(((before == step - 1) & real).sum(axis=1) / size)
            with_line_before.append(_overlap_of_lines(places, real, num_places) / size[1:])
            distances += _count_distances(step - before[real], before[real] >= 0)
        last[lines, places] = step
        last[:, -1] = -1
    return _figures(trace, np.array(kept), np.array(with_line_before), distances)


def _overlap_of_lines(places: NDArray[np.int32], real: NDArray[np.bool_], num_places: int) -> NDArray[np.int64]:
    """[lines - 1]: how many of a line's positions the line before has too."""
    has = np.zeros((len(places), num_places + 1), bool)
    has[np.arange(len(places))[:, None], places] = True
    has[:, -1] = False
    both: NDArray[np.int64] = (np.take_along_axis(has[:-1], places[1:], axis=1) & real[1:]).sum(axis=1)
    return both


def _count_distances(steps: NDArray[np.int32], again: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Of selected positions: how many were last selected so long ago; the last number is of those that never were."""
    place = np.searchsorted(REUSE_EDGES, steps[again], side="right") - 1
    counts = np.bincount(place, minlength=len(REUSE_EDGES))
    return np.append(counts, np.count_nonzero(~again))


def _figures(
    trace: Trace, kept: NDArray[np.float64], with_line_before: NDArray[np.float64], distances: NDArray[np.int64]
) -> dict[str, Any]:
    if not len(kept):
        return {}
    histogram = np.histogram(kept, BINS, (0, 1))[0]
    ends = (*(edge - 1 for edge in REUSE_EDGES[1:]), None)
    return {
        "overlap": {
            "mean": float(kept.mean()),
            f"by_{trace.line_name}": kept.mean(axis=0).round(5).tolist(),
            "by_step": kept.mean(axis=1).round(5).tolist(),
            "histogram": histogram.tolist(),  # of lines and steps, in equal bins from 0 to 1
        },
        f"{trace.line_name}_overlap": float(with_line_before.mean()) if with_line_before.size else None,
        "reuse": [
            {"steps": [first, last], "count": int(count)}
            for first, last, count in zip(REUSE_EDGES, ends, distances[:-1], strict=True)
        ],
        "first_uses": int(distances[-1]),
    }
