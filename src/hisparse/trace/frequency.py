"""Policies that count: LFU, LRU-2, and LRFU (frequency that decays), with and without memory of records that left."""

import numpy as np

from hisparse.trace.policy import Keys, SimulatedPolicy
from hisparse.trace.simulated_pool import SimulatedPool, Slots
from hisparse.trace.stream import Stream

DECAY = 0.95  # of a count, a step
TIE = 1e-14  # times the row: orders equal counts, and no others


class LFU(SimulatedPolicy):
    """Fewest uses since it came; among equals, the least recently used."""

    def __init__(self, pool: SimulatedPool, stream: Stream) -> None:
        super().__init__(pool, stream)
        self._uses = np.zeros(self.num_all, np.int64)
        self._last = np.zeros(self.num_all, np.int64)

    def hit(self, slots: Slots, step: int) -> None:
        """See `SimulatedPolicy`."""
        self._uses[slots] += 1
        self._last[slots] = step

    def entered(self, slots: Slots, step: int) -> None:
        """See `SimulatedPolicy`."""
        self._uses[slots], self._last[slots] = 1, step

    def keys(self, step: int) -> Keys:
        """See `SimulatedPolicy`."""
        return self.by(self._uses, self._last)


class LRU2(SimulatedPolicy):
    """The oldest second last use leaves; among equals, the oldest last one. Uses before a record left count."""

    def __init__(self, pool: SimulatedPool, stream: Stream) -> None:
        super().__init__(pool, stream)
        self._last = np.zeros(self.num_all, np.int64)
        self._before = np.zeros(self.num_all, np.int64)  # 0: none
        self._last_of_row = np.zeros(pool.num_lines * pool.num_rows, np.int64)  # of those that left; 0: never here

    def hit(self, slots: Slots, step: int) -> None:
        """See `SimulatedPolicy`."""
        self._before[slots] = self._last[slots]
        self._last[slots] = step + 1

    def entered(self, slots: Slots, step: int) -> None:
        """See `SimulatedPolicy`."""
        self._before[slots] = self._last_of_row[self.pool.row_of_slot[slots]]
        self._last[slots] = step + 1

    def left(self, slots: Slots, step: int) -> None:
        """See `SimulatedPolicy`."""
        self._last_of_row[self.pool.row_of_slot[slots]] = self._last[slots]

    def keys(self, step: int) -> Keys:
        """See `SimulatedPolicy`."""
        return self.by(self._before, self._last)


class LRFU(SimulatedPolicy):
    """Each use counts 0.95 to the power of its age in steps; the lowest sum leaves. Counts outlive residence.

    A count is kept as of its last use, in logarithms, where all age alike: no step touches those it does not use.
    """

    remembers = True

    def __init__(self, pool: SimulatedPool, stream: Stream) -> None:
        super().__init__(pool, stream)
        self._count = np.full(self.num_all, -np.inf)  # log of the count, as of step 0
        self._count_of_row = np.full(pool.num_lines * pool.num_rows, -np.inf)

    def hit(self, slots: Slots, step: int) -> None:
        """See `SimulatedPolicy`."""
        self._count[slots] = np.logaddexp(self._count[slots], -step * np.log(DECAY))

    def entered(self, slots: Slots, step: int) -> None:
        """See `SimulatedPolicy`."""
        self._count[slots] = self._count_of_row[self.pool.row_of_slot[slots]]
        self.hit(slots, step)

    def left(self, slots: Slots, step: int) -> None:
        """See `SimulatedPolicy`."""
        if self.remembers:
            self._count_of_row[self.pool.row_of_slot[slots]] = self._count[slots]

    def keys(self, step: int) -> Keys:
        """See `SimulatedPolicy`."""
        keys: Keys = self._count + TIE * self.pool.row_of_slot
        return keys.reshape(self.pool.shape)


class LRFUResident(LRFU):
    """LRFU whose counts begin anew when a record comes back."""

    remembers = False
