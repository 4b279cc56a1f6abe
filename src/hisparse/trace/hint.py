"""A negative result, kept because everybody asks: the selection of the layer before as a hint of what to fetch.

Fetching what it names and is not resident, before the layer selects, would save some misses and cost more traffic.
"""

from typing import NamedTuple

import numpy as np

from hisparse.trace.order_policies import LRU
from hisparse.trace.simulated_pool import SimulatedPool, Slots
from hisparse.trace.simulator import Outcome, replay
from hisparse.trace.stream import Stream


class Hint(NamedTuple):
    """How good hints were, under LRU; counts are of all lines but the first."""

    size: int  # B
    misses: int  # records that the lines miss
    hinted: int  # records that the lines before name and that are not resident
    useful: int  # those of them that are missed

    @property
    def recall(self) -> float:
        """Share of the misses that a hint names."""
        return self.useful / max(self.misses, 1)

    @property
    def precision(self) -> float:
        """Share of the hints that are missed."""
        return self.useful / max(self.hinted, 1)

    @property
    def traffic(self) -> float:
        """Records fetched with hints, over those fetched without."""
        return (self.misses + self.hinted - self.useful) / max(self.misses, 1)


class HintedLRU(LRU):
    """LRU, looking at what the hints would have done."""

    def __init__(self, pool: SimulatedPool, stream: Stream, skip: int) -> None:
        super().__init__(pool, stream)
        self._skip = skip
        self.misses = self.hinted = self.useful = 0

    def hit(self, slots: Slots, step: int) -> None:
        """See `SimulatedPolicy`. Nobody has left or entered in this step yet."""
        super().hit(slots, step)
        if step < self._skip:
            return
        rows = self.stream.selected[step]
        hints = rows[rows < (self.pool.num_lines - 1) * self.pool.num_rows] + self.pool.num_rows
        hints = hints[self.pool.slot_of_row[hints] < 0]
        missed = rows[(rows >= self.pool.num_rows) & (self.pool.slot_of_row[rows] < 0)]
        self.misses += len(missed)
        self.hinted += len(hints)
        self.useful += len(np.intersect1d(hints, missed, assume_unique=True))


def simulate_lru_with_hints(stream: Stream, size: int, skip: int = 0) -> tuple[Outcome, Hint]:
    """LRU with B = `size`, and what the hints are worth after the first `skip` steps."""
    pool = SimulatedPool(stream, size)
    rule = HintedLRU(pool, stream, skip)
    misses = replay(stream, pool, rule)
    return Outcome("lru", size, misses), Hint(size, rule.misses, rule.hinted, rule.useful)
