"""The slots of every line in a simulation: who is where, and who has just been used.

Each line has B slots and one more, which is the newest position's own. Slots and rows are numbered flat over lines, so
that one NumPy call does a step of all lines.
"""

import numpy as np
from numpy.typing import NDArray

from hisparse.trace.stream import Rows, Stream

Slots = NDArray[np.int64]
NEVER_USED = -1  # when a record that came unasked was last used
FREE = np.iinfo(np.int64).max  # and a slot without a record: after every step
LAST = np.iinfo(np.int64).max  # a key above all others


class SimulatedPool:
    """Slots of all lines of a stream.

    Args:
        stream: what will be replayed.
        size: B, slots of a line without the newest position's own. From the stream's rows up, nobody ever leaves: so
            many slots do for all larger sizes.
    """

    def __init__(self, stream: Stream, size: int) -> None:
        self.size = min(size, stream.num_rows)
        self.num_lines, self.num_rows = stream.num_lines, stream.num_rows
        self.num_slots = self.size + 1  # of a line
        self.slot_of_row = np.full(self.num_lines * self.num_rows, -1, np.int64)
        self.row_of_slot = np.full(self.num_lines * self.num_slots, -1, np.int64)
        self.used_at = np.full(self.num_lines * self.num_slots, FREE, np.int64)  # the step of the last use
        self.num_resident = np.zeros(self.num_lines, np.int64)

    @property
    def shape(self) -> tuple[int, int]:
        """Of a table of slots by line."""
        return self.num_lines, self.num_slots

    def may_leave(self, step: int) -> NDArray[np.bool_]:
        """[lines, slots of a line]: residents that the step has not used."""
        return (self.used_at < step).reshape(self.shape)

    def enter(self, rows: Rows) -> Slots:
        """Give rows that are nowhere a free slot of their line; their slots."""
        lines = rows // self.num_rows
        counts = np.bincount(lines, minlength=self.num_lines)
        slots = self._free_slots(counts)
        self.slot_of_row[rows] = slots
        self.row_of_slot[slots] = rows
        self.used_at[slots] = NEVER_USED
        self.num_resident += counts
        return slots

    def leave(self, slots: Slots) -> None:
        """Take the records of these slots out."""
        self.slot_of_row[self.row_of_slot[slots]] = -1
        self.row_of_slot[slots] = -1
        self.used_at[slots] = FREE
        self.num_resident -= np.bincount(slots // self.num_slots, minlength=self.num_lines)

    def lowest(self, keys: NDArray[np.int64 | np.float64], counts: NDArray[np.int64], step: int) -> Slots:
        """The resident slots with the lowest keys that this step has not used, `counts` of each line, ascending.

        Values are partitioned, which is several times as fast as partitioning indices, and compared with the highest
        that leaves.
        """
        most = int(counts.max(initial=0))
        if not most:
            return np.empty(0, np.int64)
        keys = np.where(self.may_leave(step), keys, np.inf if keys.dtype.kind == "f" else LAST)
        lowest = np.partition(keys, most - 1, axis=1)[:, :most]
        lowest.sort(axis=1)
        highest = lowest[np.arange(self.num_lines), counts - 1]
        leaves = (keys <= highest[:, None]) & (counts > 0)[:, None]
        chosen = np.flatnonzero(leaves)
        return chosen if len(chosen) == counts.sum() else self._without_ties(keys, counts)

    def _without_ties(self, keys: NDArray[np.int64 | np.float64], counts: NDArray[np.int64]) -> Slots:
        """As `lowest`, where keys are equal: the first slots of them."""
        rank = keys.argsort(axis=1, kind="stable").argsort(axis=1)
        return np.flatnonzero(rank < counts[:, None])

    def _free_slots(self, counts: NDArray[np.int64]) -> Slots:
        """The first free slots of each line, so many as asked for, in the order of the lines."""
        free = np.flatnonzero(self.used_at == FREE)
        stay_free = self.num_slots - self.num_resident - counts
        skipped = np.repeat(stay_free.cumsum() - stay_free, counts)  # by the lines before
        slots: Slots = free[np.arange(len(skipped)) + skipped]
        return slots
