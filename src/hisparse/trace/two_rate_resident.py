"""The two-rate rule as it was first published with the traces: nothing is remembered of records that left.

It stands here to compare with. Its tier is ranked with the step's own scores, which a list that is made before the
step cannot do.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from hisparse.order import HEAT_BITS, HOT, warm
from hisparse.trace.order_policies import runners_up
from hisparse.trace.policy import Keys, SimulatedPolicy
from hisparse.trace.simulated_pool import SimulatedPool, Slots
from hisparse.trace.stream import Stream

ENTRY = 1023 << HEAT_BITS | 205
HALF = 2047  # what a runner-up is worth


class TwoRateResident(SimulatedPolicy):
    """Lowest sum of the two averages first."""

    def __init__(self, pool: SimulatedPool, stream: Stream) -> None:
        super().__init__(pool, stream)
        self._heat = np.zeros(self.num_all, np.int32)

    def hit(self, slots: Slots, step: int) -> None:
        """See `SimulatedPolicy`."""
        worth = np.zeros(self.num_all, np.int32)
        self._rank(worth, step)
        worth[slots] = HOT
        self._heat = warm(torch.from_numpy(self._heat), torch.from_numpy(worth)).numpy()

    def entered(self, slots: Slots, step: int) -> None:
        """See `SimulatedPolicy`."""
        self._heat[slots] = ENTRY

    def keys(self, step: int) -> Keys:
        """See `SimulatedPolicy`."""
        sums = (self._heat >> HEAT_BITS) + (self._heat & HOT)
        keys: Keys = (sums.astype(np.int64) << 32) | self.pool.row_of_slot.clip(min=0)
        return keys.reshape(self.pool.shape)

    def _rank(self, worth: NDArray[np.int32], step: int) -> None:
        """What the step's ranks are worth, beside its selection."""


class TwoRateResidentTier(TwoRateResident):
    """With the selector's ranks."""

    needs_scores = True

    def _rank(self, worth: NDArray[np.int32], step: int) -> None:
        worth[runners_up(self.pool, self.stream, step)] = HALF
