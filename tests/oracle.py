"""A cache written for the tests alone: dictionaries, loops, and textbook replacement, nothing vectorised."""

from dataclasses import dataclass, field

Row = int
Time = tuple[int, int]  # step, then 0: fetched or 1: hit


@dataclass
class LayerOracle:
    """One layer's resident rows, with when each was last used and when it entered."""

    num_slots: int
    policy: str = "lru"
    used: dict[Row, Time] = field(default_factory=dict)
    entered: dict[Row, Time] = field(default_factory=dict)
    misses: int = 0

    def stage(self, rows: list[Row], step: int) -> None:
        """Prefill records take free slots only."""
        for row in rows[: self.num_slots - len(self.used)]:
            self._enter(row, (step, 0))

    def insert(self, rows: list[Row], step: int) -> None:
        """New records enter like fetched ones."""
        self._make_room(len(rows), step)
        for row in rows:
            self._enter(row, (step, 0))

    def resolve(self, rows: list[Row], step: int) -> None:
        """Hits are marked first, then every missing row is fetched once."""
        missing = sorted({row for row in rows if row not in self.used})
        for row in rows:
            if row in self.used:
                self.used[row] = (step, 1)
        self._make_room(len(missing), step)
        for row in missing:
            self._enter(row, (step, 0))
        self.misses += len(missing)

    def forget(self, rows: list[Row]) -> None:
        """The rows' request left the device."""
        for row in rows:
            self.used.pop(row, None)
            self.entered.pop(row, None)

    def _enter(self, row: Row, now: Time) -> None:
        self.used[row] = self.entered[row] = now

    def _make_room(self, count: int, step: int) -> None:
        key = self.used if self.policy == "lru" else self.entered
        while len(self.used) + count > self.num_slots:
            victims = [row for row, time in self.used.items() if time[0] < step]
            self.forget([min(victims, key=lambda row: (key[row], row))])
