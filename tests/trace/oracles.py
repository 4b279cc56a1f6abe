"""Policies again, one line and one record at a time, in plain Python, as they are usually written down.

Each is told of a step's hits, then asked for victims one by one, then told of the records that enter, in order. Records
that the step uses are never taken; a hand passes over them and leaves their marks alone.
"""

from collections.abc import Callable, Iterable, Sequence

NEVER = 10**9


class Oracle:
    """One line of a pool."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.step = -1

    def hit(self, row: int) -> None:
        raise NotImplementedError

    def enter(self, row: int, selected: bool) -> None:
        raise NotImplementedError

    def evict(self, used: set[int]) -> int:
        """Take one record out; not one of those used."""
        raise NotImplementedError

    def end(self, residents: set[int]) -> None:
        """The victims of the step are gone, and the new ones not here yet."""


class ByKey(Oracle):
    """The lowest key leaves, and among equals the lowest row."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.here: set[int] = set()

    def key(self, row: int) -> tuple[float, ...]:
        raise NotImplementedError

    def enter(self, row: int, selected: bool) -> None:
        self.here.add(row)

    def evict(self, used: set[int]) -> int:
        victim = min(self.here - used, key=lambda row: (*self.key(row), row))
        self.here.remove(victim)
        return victim


class Recency(ByKey):
    """LRU; `fetched` is how much older a record is that was fetched in the step in which others were hit."""

    fetched = 0.0

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.last: dict[int, float] = {}

    def key(self, row: int) -> tuple[float, ...]:
        return (self.last[row],)

    def hit(self, row: int) -> None:
        self.last[row] = self.step

    def enter(self, row: int, selected: bool) -> None:
        super().enter(row, selected)
        self.last[row] = self.step - (0 if selected else 1) - self.fetched


class PaperRecency(Recency):
    fetched = 0.5


class Fifo(Recency):
    def hit(self, row: int) -> None:
        pass


class Frequency(Recency):
    """LFU, recency breaking ties."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.uses: dict[int, int] = {}

    def key(self, row: int) -> tuple[float, ...]:
        return (self.uses[row], self.last[row])

    def hit(self, row: int) -> None:
        super().hit(row)
        self.uses[row] += 1

    def enter(self, row: int, selected: bool) -> None:
        super().enter(row, selected)
        self.uses[row] = 1


class SecondLast(ByKey):
    """LRU-2 with memory."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.times: dict[int, list[int]] = {}

    def key(self, row: int) -> tuple[float, ...]:
        times = self.times[row]
        return (times[-2] if len(times) > 1 else -NEVER, times[-1])

    def hit(self, row: int) -> None:
        self.times[row].append(self.step)

    def enter(self, row: int, selected: bool) -> None:
        super().enter(row, selected)
        self.times.setdefault(row, []).append(self.step - (0 if selected else 1))


class Decayed(ByKey):
    """LRFU: a use of n steps ago counts 0.95 ** n."""

    remembers = True

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.times: dict[int, list[int]] = {}

    def key(self, row: int) -> tuple[float, ...]:
        return (round(sum(0.95 ** (self.step - time) for time in self.times[row]), 9),)

    def hit(self, row: int) -> None:
        self.times[row].append(self.step)

    def enter(self, row: int, selected: bool) -> None:
        super().enter(row, selected)
        time = self.step - (0 if selected else 1)
        self.times[row] = [*(self.times.get(row, []) if self.remembers else []), time]


class DecayedResident(Decayed):
    remembers = False


class Farthest(ByKey):
    """Belady's rule."""

    def __init__(self, size: int, uses: dict[int, list[int]]) -> None:
        super().__init__(size)
        self.uses = uses  # of each row, ascending

    def key(self, row: int) -> tuple[float, ...]:
        return (-min((step for step in self.uses.get(row, []) if step > self.step), default=NEVER),)

    def hit(self, row: int) -> None:
        pass


class Sieve(Oracle):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.queue: list[int] = []  # oldest first
        self.marked: dict[int, bool] = {}
        self.hand = 0

    def hit(self, row: int) -> None:
        self.marked[row] = True

    def enter(self, row: int, selected: bool) -> None:
        self.queue.append(row)
        self.marked[row] = False

    def evict(self, used: set[int]) -> int:
        while True:
            if self.hand >= len(self.queue):
                self.hand = 0
            row = self.queue[self.hand]
            if row not in used and not self.marked[row]:
                return self.queue.pop(self.hand)
            if row not in used:
                self.marked[row] = False
            self.hand += 1


class Clock(Oracle):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.places: list[int | None] = [None] * (size + 1)  # one is the newest record's own
        self.marked: dict[int, bool] = {}
        self.hand = 0

    def hit(self, row: int) -> None:
        self.marked[row] = True

    def enter(self, row: int, selected: bool) -> None:
        self.places[self.places.index(None)] = row
        self.marked[row] = False

    def evict(self, used: set[int]) -> int:
        while True:
            place, self.hand = self.hand, (self.hand + 1) % len(self.places)
            row = self.places[place]
            if row is None or row in used:
                continue
            if not self.marked[row]:
                self.places[place] = None
                return row
            self.marked[row] = False


class S3Fifo(Oracle):
    """Victims come from the small queue while it is too long or nobody in the main one can leave."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.small: list[int] = []
        self.main: list[int] = []
        self.uses: dict[int, int] = {}
        self.left_small: list[int] = []  # in order; the last `size` are remembered

    def hit(self, row: int) -> None:
        self.uses[row] = min(self.uses[row] + 1, 3)

    def enter(self, row: int, selected: bool) -> None:
        (self.main if row in self.left_small[-self.size :] else self.small).append(row)
        self.uses[row] = 0

    def evict(self, used: set[int]) -> int:
        victim = self._from_small(used) if len(self.small) > max(self.size // 10, 1) else None
        if victim is None:
            victim = self._from_main(used)
        assert victim is not None
        return victim

    def _from_small(self, used: set[int]) -> int | None:
        for row in list(self.small):
            if len(self.small) <= max(self.size // 10, 1):
                return None
            if self.uses[row] > 1:
                self.small.remove(row)
                self.main.append(row)
                self.uses[row] = 0
            elif row not in used:
                self.small.remove(row)
                self.left_small.append(row)
                return row
        return None

    def _from_main(self, used: set[int]) -> int | None:
        if not set(self.main) - used:
            return None
        while True:
            row = self.main.pop(0)
            if row not in used and not self.uses[row]:
                return row
            if row not in used:
                self.uses[row] -= 1
            self.main.append(row)


def misses(
    make: Callable[[], Oracle], selections: Sequence[Iterable[int]], newest: Sequence[int], size: int
) -> list[int]:
    """Misses of each step of one line; selections without the newest position, in the order of their rows."""
    oracle = make()
    here: set[int] = set()
    counts = []
    for step, selected in enumerate(selections):
        oracle.step = step
        if step and newest[step - 1] >= 0:
            oracle.enter(newest[step - 1], False)
            here.add(newest[step - 1])
        used = set(selected) & here
        for row in sorted(used):
            oracle.hit(row)
        missing = [row for row in selected if row not in here]
        for _ in range(max(len(here) + len(missing) - size, 0)):
            here.remove(oracle.evict(used))
        oracle.end(here)
        for row in missing:
            oracle.enter(row, True)
            here.add(row)
        counts.append(len(missing))
    return counts
