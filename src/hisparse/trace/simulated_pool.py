"""The slots of every line in a simulation: who is where, and who has just been used.

Each line has B slots and one more, which is the newest position's own. Slots and rows are numbered flat over lines, so
that one NumPy call does a step of all lines.
"""

import numpy as np
from numpy.typing import NDArray

from hisparse.trace.stream import Rows, Stream

Slots = NDArray[np.int64]
NEVER_USED = -1


class SimulatedPool:
    """Slots of all lines of a stream.

    Args:
        stream: what will be replayed.
        size: B, slots of a line without the newest position's own.
    """

    def __init__(self, stream: Stream, size: int) -> None:
        self.size = size
        self.num_lines, self.num_rows = stream.num_lines, stream.num_rows
        self.num_slots = size + 1  # of a line
        self.slot_of_row = np.full(self.num_lines * self.num_rows, -1, np.int64)
        self.row_of_slot = np.full(self.num_lines * self.num_slots, -1, np.int64)
        self.used_at = np.full(self.num_lines * self.num_slots, NEVER_USED, np.int64)  # the step of the last use
        self.num_resident = np.zeros(self.num_lines, np.int64)

    @property
    def shape(self) -> tuple[int, int]:
        """Of a table of slots by line."""
        return self.num_lines, self.num_slots

    def enter(self, rows: Rows) -> Slots:
        """Give rows that are nowhere a free slot of their line; their slots."""
        lines = rows // self.num_rows
        counts = np.bincount(lines, minlength=self.num_lines)
        slots = self._free_slots(counts)
        self.slot_of_row[rows] = slots
        self.row_of_slot[slots] = rows
        self.num_resident += counts
        return slots

    def leave(self, slots: Slots) -> None:
        """Take the records of these slots out."""
        self.slot_of_row[self.row_of_slot[slots]] = -1
        self.row_of_slot[slots] = -1
        self.used_at[slots] = NEVER_USED
        self.num_resident -= np.bincount(slots // self.num_slots, minlength=self.num_lines)

    def lowest(self, keys: NDArray[np.int64 | np.float64], counts: NDArray[np.int64], step: int) -> Slots:
        """The resident slots with the lowest keys that this step has not used, `counts` of each line."""
        most = int(counts.max(initial=0))
        if not most:
            return np.empty(0, np.int64)
        last = np.inf if keys.dtype.kind == "f" else np.iinfo(np.int64).max
        stays = (self.row_of_slot < 0) | (self.used_at == step)
        keys = np.where(stays, last, keys.reshape(-1)).reshape(self.shape)
        found = np.argpartition(keys, most - 1, axis=1)[:, :most]
        found += np.arange(self.num_lines)[:, None] * self.num_slots  # flat
        by_key = keys.reshape(-1)[found].argsort(axis=1, kind="stable")
        by_key += np.arange(self.num_lines)[:, None] * most
        chosen: Slots = found.reshape(-1)[by_key[np.arange(most) < counts[:, None]]]
        return chosen

    def _free_slots(self, counts: NDArray[np.int64]) -> Slots:
        """The first free slots of each line, so many as asked for, in the order of the lines."""
        free = np.flatnonzero(self.row_of_slot < 0)
        num_free = self.num_slots - self.num_resident
        first = np.repeat(num_free.cumsum() - num_free, counts)
        rank = np.arange(len(first)) - np.repeat(counts.cumsum() - counts, counts)
        slots: Slots = free[first + rank]
        return slots
