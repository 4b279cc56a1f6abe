"""What a policy is to the simulator: it hears of hits, entries and exits, and ranks the residents.

Everything is flat over lines (simulated_pool.py), and every call is about all lines at once.
"""

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from hisparse.trace.simulated_pool import SimulatedPool, Slots
from hisparse.trace.stream import Stream

Keys = NDArray[np.int64 | np.float64]


class SimulatedPolicy:
    """The base of all: residents with the lowest key leave.

    Args:
        pool: whose slots it ranks.
        stream: what is replayed; only Belady's rule looks ahead.
    """

    needs_scores: ClassVar[bool] = False

    def __init__(self, pool: SimulatedPool, stream: Stream) -> None:
        self.pool = pool
        self.stream = stream
        self.num_all = pool.num_lines * pool.num_slots

    def hit(self, slots: Slots, step: int) -> None:
        """These slots hold what the step selects."""

    def entered(self, slots: Slots, step: int) -> None:
        """Records came into these slots: fetched, or produced by the step."""

    def left(self, slots: Slots, step: int) -> None:
        """The records of these slots are about to leave; called once a step, after `victims` and before `entered`."""

    def keys(self, step: int) -> Keys:
        """[lines, slots of a line]: the lowest leave. Keys of free slots and of those used now do not matter."""
        raise NotImplementedError

    def by(self, *numbers: NDArray[np.int64]) -> Keys:
        """Keys that order by numbers, the first one first, and at last by row.

        Numbers are from 0 on; all but the first are at most two above the steps.
        """
        keys, *others = numbers
        for number in others:
            keys = keys * (self.stream.num_steps + 3) + number
        keys = keys * len(self.pool.slot_of_row) + self.pool.row_of_slot
        return keys.reshape(self.pool.shape)

    def victims(self, counts: NDArray[np.int64], step: int) -> Slots:
        """Who leaves, `counts` of each line."""
        if not counts.any():
            return np.empty(0, np.int64)
        return self.pool.lowest(self.keys(step), counts, step)
