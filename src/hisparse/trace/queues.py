"""CLOCK, SIEVE and S3-FIFO: queues that are walked with a hand, a whole step of all lines at a time.

A hand that finds a record referenced leaves it and goes on, so the next victims are, in this order, the unreferenced
ones from the hand on, and then those it has unmarked on its way round. That is a key: the distance from the hand, plus
a whole round for each mark. Records that the step selects are passed over and keep their marks.
"""

import numpy as np
from numpy.typing import NDArray

from hisparse.trace.policy import Keys, SimulatedPolicy
from hisparse.trace.simulated_pool import SimulatedPool, Slots
from hisparse.trace.stream import Stream

ROUND = 1 << 40  # above any distance


class HandPolicy(SimulatedPolicy):
    """What CLOCK and SIEVE have in common: a mark for each record, and a hand for each line."""

    def __init__(self, pool: SimulatedPool, stream: Stream) -> None:
        super().__init__(pool, stream)
        self._marked = np.zeros(pool.shape, bool)
        self._hand = np.zeros(pool.num_lines, np.int64)
        self._distance = np.zeros(pool.shape, np.int64)  # from the hand, as of the last `keys`
        self._keys = self._distance

    def hit(self, slots: Slots, step: int) -> None:
        """See `SimulatedPolicy`."""
        self._marked.reshape(-1)[slots] = True

    def entered(self, slots: Slots, step: int) -> None:
        """See `SimulatedPolicy`."""
        self._marked.reshape(-1)[slots] = False

    def keys(self, step: int) -> Keys:
        """See `SimulatedPolicy`."""
        self._distance = self._find_distance()
        self._keys = self._distance + self._marked * ROUND
        return self._keys

    def left(self, slots: Slots, step: int) -> None:
        """See `SimulatedPolicy`. The hand stands behind the last victim."""
        if not len(slots):
            return
        last = last_by_line(self._keys, slots, self.pool)
        unmark_passed(self._marked, self._distance, last, self.pool.used_at == step)
        self._hand = np.where(last < 0, self._hand, self._behind(last))

    def _find_distance(self) -> NDArray[np.int64]:
        """[lines, slots of a line]: in the order in which the hand comes by."""
        raise NotImplementedError

    def _behind(self, last: NDArray[np.int64]) -> NDArray[np.int64]:
        """[lines]: where the hand stands after victims up to the key `last`."""
        raise NotImplementedError


class Clock(HandPolicy):
    """CLOCK: one mark; a new record takes an evicted place, unmarked. The hand is at a place."""

    def _find_distance(self) -> NDArray[np.int64]:
        distance = np.arange(self.pool.num_slots) - self._hand[:, None]
        return distance + (distance < 0) * self.pool.num_slots

    def _behind(self, last: NDArray[np.int64]) -> NDArray[np.int64]:
        return (self._hand + last % ROUND + 1) % self.pool.num_slots


class Sieve(HandPolicy):
    """SIEVE: one mark; records stand in the order in which they came, and new ones at the young end.

    They are numbered in that order, and the hand is the first number that it has not passed.
    """

    def __init__(self, pool: SimulatedPool, stream: Stream) -> None:
        super().__init__(pool, stream)
        self._number = np.zeros(pool.shape, np.int64)
        self._next = 0

    def entered(self, slots: Slots, step: int) -> None:
        """See `SimulatedPolicy`."""
        super().entered(slots, step)
        self._number.reshape(-1)[slots] = self._next + np.arange(len(slots))
        self._next += len(slots)

    def _find_distance(self) -> NDArray[np.int64]:
        """Numbers, those before the hand after all others."""
        return self._number + (self._number < self._hand[:, None]) * (ROUND // 2)

    def _behind(self, last: NDArray[np.int64]) -> NDArray[np.int64]:
        return last % (ROUND // 2) + 1


class S3Fifo(SimulatedPolicy):
    """S3-FIFO: a small queue for what is new, a main one for what was used again, and a list of who left the small one.

    The small queue has a tenth of the slots, the list remembers as many records as there are slots, uses count up to 3,
    and a record used more than once moves on to the main queue.
    """

    CAP, PROMOTED = 3, 1

    def __init__(self, pool: SimulatedPool, stream: Stream) -> None:
        super().__init__(pool, stream)
        self._uses = np.zeros(pool.shape, np.int64)
        self._number = np.zeros(pool.shape, np.int64)  # in the order of entry to the queue
        self._in_small = np.zeros(pool.shape, bool)
        self._small_size = max(pool.size // 10, 1)
        self._next = 0
        self._left_as = np.full(pool.num_lines * pool.num_rows, -pool.size - 1)  # the how-manieth of its line
        self._num_left = np.zeros(pool.num_lines, np.int64)

    def hit(self, slots: Slots, step: int) -> None:
        """See `SimulatedPolicy`."""
        uses = self._uses.reshape(-1)
        uses[slots] = np.minimum(uses[slots] + 1, self.CAP)

    def entered(self, slots: Slots, step: int) -> None:
        """See `SimulatedPolicy`. Who left the small queue not long ago enters the main one."""
        rows = self.pool.row_of_slot[slots]
        remembered = self._num_left[slots // self.pool.num_slots] - self._left_as[rows] <= self.pool.size
        self._uses.reshape(-1)[slots] = 0
        self._in_small.reshape(-1)[slots] = ~remembered
        self._enqueue(slots)

    def victims(self, counts: NDArray[np.int64], step: int) -> Slots:
        """See `SimulatedPolicy`. From the small queue while it is too long, then from the main one."""
        if not counts.any():
            return np.empty(0, np.int64)
        in_main = ~self._in_small & self.pool.may_leave(step)
        small = self._leave_small(counts, counts - in_main.sum(axis=1), step)
        rest = counts - np.bincount(small // self.pool.num_slots, minlength=self.pool.num_lines)
        victims: Slots = np.concatenate([small, self._leave_main(rest, step)])
        return victims

    def left(self, slots: Slots, step: int) -> None:
        """See `SimulatedPolicy`."""
        self._in_small.reshape(-1)[slots] = False

    def _leave_small(self, counts: NDArray[np.int64], least: NDArray[np.int64], step: int) -> Slots:
        """Walk the small queues from their old ends: promote, or take as a victim.

        They are walked while they are too long, or while victims are fewer than the `least` that the main ones lack.
        """
        slots = np.flatnonzero(self._in_small.reshape(-1) & (self.pool.row_of_slot >= 0))
        lines = slots // self.pool.num_slots
        by_age = (lines * ROUND + self._number.reshape(-1)[slots]).argsort()
        slots, lines = slots[by_age], lines[by_age]
        lengths = np.bincount(lines, minlength=self.pool.num_lines)
        first = np.repeat(lengths.cumsum() - lengths, lengths)
        moves_on = self._uses.reshape(-1)[slots] > self.PROMOTED
        leaves = ~moves_on & (self.pool.used_at[slots] != step)
        have_left = _before(leaves, first)
        too_long = lengths[lines] - _before(moves_on | leaves, first) > self._small_size
        reached = (too_long | (have_left < least[lines])) & (have_left < counts[lines])
        promoted = slots[moves_on & reached]
        victims: Slots = slots[leaves & reached]
        self._in_small.reshape(-1)[promoted] = False
        self._uses.reshape(-1)[promoted] = 0
        self._enqueue(promoted)
        self._remember(victims)
        return victims

    def _leave_main(self, counts: NDArray[np.int64], step: int) -> Slots:
        """Walk the main queues: who was used goes to the young end, one use poorer."""
        if not counts.any():
            return np.empty(0, np.int64)
        here = ~self._in_small & (self.pool.row_of_slot >= 0).reshape(self.pool.shape)
        keys = np.where(here, self._number + self._uses * ROUND, (self.CAP + 2) * ROUND)
        victims = self.pool.lowest(keys, counts, step)
        last = last_by_line(keys, victims, self.pool)[:, None]
        was_reached = self._number <= last % ROUND  # in the walk's last round
        rounds = last // ROUND + was_reached  # times that the walk came by
        used_now = (self.pool.used_at == step).reshape(self.pool.shape)
        passed = here & (last >= 0) & (rounds > 0)
        self._uses -= np.where(passed & ~used_now, np.minimum(rounds, self._uses), 0)
        moved = np.flatnonzero(passed & was_reached)
        self._enqueue(moved[self._number.reshape(-1)[moved].argsort()])
        return victims

    def _enqueue(self, slots: Slots) -> None:
        """To the young end of their queues, in this order."""
        self._number.reshape(-1)[slots] = self._next + np.arange(len(slots))
        self._next += len(slots)

    def _remember(self, slots: Slots) -> None:
        """Records that leave the small queue, in the order of the lines."""
        lines = slots // self.pool.num_slots
        counts = np.bincount(lines, minlength=self.pool.num_lines)
        rank = np.arange(len(slots)) - np.repeat(counts.cumsum() - counts, counts)
        self._left_as[self.pool.row_of_slot[slots]] = self._num_left[lines] + rank
        self._num_left += counts


def _before(mask: NDArray[np.bool_], first: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many are true before each entry of its line, whose entries begin at `first`."""
    count = mask.cumsum() - mask
    inside: NDArray[np.int64] = count - count[first]
    return inside


def last_by_line(keys: Keys, slots: Slots, pool: SimulatedPool) -> NDArray[np.int64]:
    """[lines]: the highest key among these slots of each line, -1 where there is none."""
    last = np.full(pool.num_lines, -1, np.int64)
    np.maximum.at(last, slots // pool.num_slots, keys.reshape(-1)[slots])
    return last


def unmark_passed(
    marked: NDArray[np.bool_], distance: NDArray[np.int64], last: NDArray[np.int64], used_now: NDArray[np.bool_]
) -> None:
    """Take the marks of all that the hand passed on its way to the last victim, but not of those used in this step."""
    passed = (distance <= last[:, None]) & (last >= 0)[:, None]  # a victim with a mark is a round away: all were passed
    marked &= ~passed | used_now.reshape(marked.shape)
