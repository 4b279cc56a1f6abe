"""Belady's rule: whoever is selected last from now on leaves. No policy can miss less; it looks into the future."""

import numpy as np

from hisparse.trace.policy import Keys, SimulatedPolicy
from hisparse.trace.simulated_pool import SimulatedPool, Slots
from hisparse.trace.stream import NEVER, Stream


class Belady(SimulatedPolicy):
    """Farthest next use first."""

    def __init__(self, pool: SimulatedPool, stream: Stream) -> None:
        super().__init__(pool, stream)
        self._selected, self._newest = stream.next_uses
        self._next_of_row = np.full(pool.num_lines * pool.num_rows, NEVER, np.int32)

    def hit(self, slots: Slots, step: int) -> None:
        """See `SimulatedPolicy`."""
        self._next_of_row[self.stream.selected[step]] = self._selected[step]
        self._next_of_row[self.stream.newest[step]] = self._newest[step]

    def keys(self, step: int) -> Keys:
        """See `SimulatedPolicy`."""
        return self.by(NEVER - self._next_of_row[self.pool.row_of_slot].astype(np.int64))
