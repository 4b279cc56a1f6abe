"""The two-rate rule as it was first published with the traces: nothing is remembered of records that left.

It stands here to compare with. Its tier is ranked with the step's own scores, which a list that is made before the
step cannot do.
"""

import numpy as np
from numpy.typing import NDArray

from hisparse.trace.order_policies import runners_up
from hisparse.trace.policy import Keys, SimulatedPolicy
from hisparse.trace.simulated_pool import SimulatedPool, Slots
from hisparse.trace.stream import Stream

SELECTED, RANKED = 4095, 2047  # what a step is worth to the averages
ENTRY = (1023, 205)  # a new record's fast and slow average


class TwoRateResident(SimulatedPolicy):
    """Lowest sum of the two averages first; they move by 1/4 and 1/32 of their distance a step."""

    def __init__(self, pool: SimulatedPool, stream: Stream) -> None:
        super().__init__(pool, stream)
        self._fast = np.zeros(self.num_all, np.int64)
        self._slow = np.zeros(self.num_all, np.int64)

    def hit(self, slots: Slots, step: int) -> None:
        """See `SimulatedPolicy`."""
        worth = np.zeros(self.num_all, np.int64)
        self._rank(worth, step)
        worth[slots] = SELECTED
        self._fast += (worth - self._fast) >> 2
        self._slow += (worth - self._slow) >> 5

    def entered(self, slots: Slots, step: int) -> None:
        """See `SimulatedPolicy`."""
        self._fast[slots], self._slow[slots] = ENTRY

    def keys(self, step: int) -> Keys:
        """See `SimulatedPolicy`."""
        keys: Keys = ((self._fast + self._slow) << 32) | self.pool.row_of_slot.clip(min=0)
        return keys.reshape(self.pool.shape)

    def _rank(self, worth: NDArray[np.int64], step: int) -> None:
        """What the step's ranks are worth, beside its selection."""


class TwoRateResidentTier(TwoRateResident):
    """With the selector's ranks."""

    needs_scores = True

    def _rank(self, worth: NDArray[np.int64], step: int) -> None:
        worth[runners_up(self.pool, self.stream, step)] = RANKED
