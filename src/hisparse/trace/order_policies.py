"""The cache's own order functions (order.py) in the simulator, over tables of the same names."""

from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hisparse.device_pool import fetched, hit
from hisparse.order import HOT, POLICIES, SLOW_MASK, WARM, entry_heat, two_rate_keys, warm
from hisparse.trace.policy import Keys, SimulatedPolicy
from hisparse.trace.simulated_pool import SimulatedPool, Slots
from hisparse.trace.stream import Stream


class SimulatedTables(NamedTuple):
    """What order functions read; tensors over the policy's arrays, [lines, slots of a line]."""

    row_of_slot: Tensor
    stamp: Tensor
    entered: Tensor
    heat: Tensor


class OrderPolicy(SimulatedPolicy):
    """Keeps the stamps that the cache keeps, and ranks by an order function of it."""

    order: ClassVar[str]  # of `POLICIES`

    def __init__(self, pool: SimulatedPool, stream: Stream) -> None:
        super().__init__(pool, stream)
        self.stamp = np.zeros(self.num_all, np.int32)
        self.since = np.zeros(self.num_all, np.int32)
        self.heat = np.zeros(self.num_all, np.int32)
        arrays = (pool.row_of_slot, self.stamp, self.since, self.heat)
        self.tables = SimulatedTables(*(torch.from_numpy(array).view(pool.shape) for array in arrays))

    def hit(self, slots: Slots, step: int) -> None:
        """See `SimulatedPolicy`."""
        self.stamp[slots] = hit(step)

    def entered(self, slots: Slots, step: int) -> None:
        """See `SimulatedPolicy`."""
        self.stamp[slots] = self.since[slots] = fetched(step)

    def keys(self, step: int) -> Keys:
        """See `SimulatedPolicy`."""
        keys: NDArray[np.int64] = POLICIES[self.order].keys(self.tables, step).numpy()
        return keys


class PaperLRU(OrderPolicy):
    """The paper's LRU, and the cache's: fetched records are older than those hit in the same step."""

    order = "lru"


class LRU(PaperLRU):
    """Least recently used, fetched or hit."""

    def entered(self, slots: Slots, step: int) -> None:
        """See `SimulatedPolicy`."""
        super().entered(slots, step)
        self.stamp[slots] = hit(step)


class Fifo(OrderPolicy):
    """First in, first out."""

    order = "fifo"


class Random(OrderPolicy):
    """Anybody: the same slots in every line."""

    order = "random"

    def keys(self, step: int) -> Keys:
        """See `SimulatedPolicy`."""
        return np.broadcast_to(super().keys(step), self.pool.shape)


class TwoRate(OrderPolicy):
    """Coldest first, by a fast and a slow average; what was slow to cool is remembered of records that left."""

    def __init__(self, pool: SimulatedPool, stream: Stream) -> None:
        super().__init__(pool, stream)
        self._worth = np.zeros(self.num_all, np.int32)  # of this step
        self._slow_of_row = np.zeros(pool.num_lines * pool.num_rows, np.int32)  # when it left ...
        self._left_at = np.zeros(pool.num_lines * pool.num_rows, np.int32)  # ... and when that was

    def hit(self, slots: Slots, step: int) -> None:
        """See `SimulatedPolicy`."""
        self._worth[:] = 0
        self._worth[slots] = HOT

    def keys(self, step: int) -> Keys:
        """See `SimulatedPolicy`. The averages do not know of this step yet, like those of a list made before it."""
        return two_rate_keys(self.tables, step).numpy()

    def left(self, slots: Slots, step: int) -> None:
        """See `SimulatedPolicy`."""
        self.heat[:] = warm(torch.from_numpy(self.heat), torch.from_numpy(self._worth)).numpy()
        rows = self.pool.row_of_slot[slots]
        self._slow_of_row[rows] = self.heat[slots] & SLOW_MASK
        self._left_at[rows] = step

    def entered(self, slots: Slots, step: int) -> None:
        """See `SimulatedPolicy`."""
        rows = self.pool.row_of_slot[slots]
        away = torch.from_numpy(step - self._left_at[rows])
        self.heat[slots] = entry_heat(torch.from_numpy(self._slow_of_row[rows]), away).numpy()


class TwoRateTier(TwoRate):
    """With the selector's ranks: those just below the selection stay warm."""

    needs_scores = True

    def hit(self, slots: Slots, step: int) -> None:
        """See `SimulatedPolicy`."""
        super().hit(slots, step)
        self._worth[runners_up(self.pool, self.stream, step)] = WARM


def runners_up(pool: SimulatedPool, stream: Stream, step: int) -> Slots:
    """The slots of the residents that this step ranks k + 1 to 2k."""
    assert stream.runners_up is not None  # `needs_scores` is checked before
    slots = pool.slot_of_row[stream.runners_up[step]]
    found: Slots = slots[slots >= 0]
    return found
