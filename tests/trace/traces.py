"""Small traces that drift like real ones."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from hisparse.trace.stream import Stream
from hisparse.trace.trace import Trace

CUT = Path(__file__).parent / "cut.npz"  # 120 steps of layers 3, 9, 14 and 20 of a recorded trace, k = 160


def drifting(
    steps: int = 60, lines: int = 3, k: int = 12, context: int = 90, *, seed: int = 0, newest: bool = True
) -> Trace:
    """Each position has a score that wanders; the selection is the best k, and the next k are the runners-up."""
    rng = np.random.default_rng(seed)
    score = rng.normal(size=(lines, context + steps))
    selection = np.empty((steps, lines, k), np.int32)
    runners_up = np.empty((steps, lines, k), np.int32)
    for step in range(steps):
        score = 0.9 * score + 0.45 * rng.normal(size=score.shape)
        seen = np.where(np.arange(context + steps) <= context + step, score, -np.inf)
        best = np.argsort(-seen, axis=1)
        selection[step] = np.sort(best[:, :k])
        runners_up[step] = np.sort(best[:, k : 2 * k])
    made = np.arange(context, context + steps, dtype=np.int32)
    trace = Trace("drifting", selection, made, tuple(range(lines)), runners_up=runners_up)
    return trace if newest else replace(trace, newest=np.full(steps, -1, np.int32))


def line_of(stream: Stream, line: int) -> tuple[list[list[int]], list[int]]:
    """One line's rows of every step, and the newest row of each, -1: none."""
    first = line * stream.num_rows

    def of_line(rows: np.ndarray) -> list[int]:
        return [int(row) - first for row in rows if first <= row < first + stream.num_rows]

    newest = [(of_line(rows) or [-1])[0] for rows in stream.newest]
    return [of_line(rows) for rows in stream.selected], newest
