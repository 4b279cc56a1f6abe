"""A trace as the simulator walks it: rows instead of positions, flat over lines, one array a step.

Positions that occur get rows in a seeded random order. Records that enter in the same step do so by row, and order
functions break ties by row, so ties are broken at random, the same way in every run.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hisparse.trace.trace import Positions, Trace

Rows = NDArray[np.int64]
NEVER = np.iinfo(np.int32).max  # step of a next use that does not come


@dataclass(frozen=True, eq=False)
class Stream:
    """Selections as flat rows: line * num_rows + row.

    The newest position's record is at hand in its own step without a fetch, so it is left out of that step's selection.
    """

    selected: list[Rows]  # of each step, ascending
    runners_up: list[Rows] | None  # ranks k + 1 to 2k of each step, if the trace has them
    newest: list[Rows]  # the row that each step produces, once a line; empty where the trace does not say
    num_lines: int
    num_rows: int  # of a line
    k: int

    @property
    def num_steps(self) -> int:
        """Decode steps."""
        return len(self.selected)

    @cached_property
    def next_uses(self) -> tuple[list[NDArray[np.int32]], list[NDArray[np.int32]]]:
        """For each step, when each selected and each newest row is selected next, or `NEVER`."""
        coming = np.full(self.num_lines * self.num_rows, NEVER, np.int32)
        selected, newest = [], []
        for step in range(self.num_steps - 1, -1, -1):
            selected.append(coming[self.selected[step]])
            newest.append(coming[self.newest[step]])
            coming[self.selected[step]] = step
        return selected[::-1], newest[::-1]


def make_stream(trace: Trace, seed: int = 0) -> Stream:
    """A trace's stream."""
    order = np.random.default_rng(seed).permutation(trace.num_positions)[trace.occurring]
    num_rows = len(order)
    rows = np.full(trace.num_positions, -1, np.int64)
    rows[trace.occurring[order.argsort()]] = np.arange(num_rows)
    first = np.arange(trace.num_lines, dtype=np.int64)[:, None] * num_rows

    def flat(positions: Positions, newest: int) -> Rows:
        """[lines, n] positions of one step to ascending flat rows, without pads and without the newest."""
        wanted = (positions >= 0) & (positions != newest)
        found: Rows = (first + rows[positions])[wanted]
        return np.sort(found)

    newest = trace.newest.tolist()
    runners_up = trace.runners_up
    return Stream(
        selected=[flat(step, new) for step, new in zip(trace.selection, newest, strict=True)],
        runners_up=None if runners_up is None else [flat(*both) for both in zip(runners_up, newest, strict=True)],
        newest=[first[:, 0] + rows[new] if new >= 0 else first[:0, 0] for new in newest],
        num_lines=trace.num_lines,
        num_rows=num_rows,
        k=trace.k,
    )
