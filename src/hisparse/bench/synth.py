"""Seeded drifting top-k selections, for timing resolve without a model.

Every step replaces a binomial(k, churn) number of positions; `reuse` of the newcomers are positions dropped not
long ago, which is what an LRU tail catches. The trace hardly reacts to policy or buffer: it times, it does not
judge. The published figures use the settings in `SETTINGS`, seed 0.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

RECENT = 4  # newcomers come back from the last 4 k dropped positions


class Setting(NamedTuple):
    """What a trace is made from."""

    steps: int
    batch: int
    k: int
    context: int
    churn: float  # share of a selection that is replaced each step
    seed: int = 0

    def check(self) -> None:
        """Raise `ValueError` for a trace that cannot be made, before minutes are spent on it."""
        for name, size in (("steps", self.steps), ("requests", self.batch), ("k", self.k)):
            if size < 1:
                raise ValueError(f"{name} of a generated trace must be at least 1, got {size}")
        if self.context < self.k:
            raise ValueError(f"context must be at least k = {self.k}, for distinct positions, got {self.context}")
        if self.seed < 0:
            raise ValueError(f"seed must be a whole number from 0 on, got {self.seed}")
        if not 0 <= self.churn <= 1:
            raise ValueError(f"churn must be a share from 0 to 1, got {self.churn}")

    def make(self) -> NDArray[np.int32]:
        """The trace, int32 [steps, batch, k]."""
        return synth(self.steps, self.batch, self.k, self.context, self.churn, self.seed)


SETTINGS = {
    "low": Setting(120, 16, 2048, 100_000, 0.13),  # about 6.3 % misses at B = 2 k; batch 1, 4, 16
    "low-wide": Setting(60, 64, 2048, 40_000, 0.13),  # the same for batch 32 and 64
    "high": Setting(60, 32, 2048, 100_000, 0.27),  # about 13.2 %, the paper's rate
}


def synth(
    steps: int, batch: int, k: int, context: int, churn: float, seed: int = 0, reuse: float = 0.5
) -> NDArray[np.int32]:
    """Selections of `batch` independent requests.

    Returns:
        int32 [steps, batch, k]; positions are below `context` and distinct in a line.
    """
    rng = np.random.default_rng(seed)
    trace = np.empty((steps, batch, k), np.int32)
    for request in range(batch):
        current = rng.choice(context, k, replace=False).astype(np.int32)
        selected = np.zeros(context, bool)
        selected[current] = True
        dropped: list[int] = []
        for step in range(steps):
            trace[step, request] = current
            count = int(rng.binomial(k, churn))
            if count == 0:
                continue
            leaving = rng.choice(k, count, replace=False)
            gone = current[leaving].copy()
            selected[gone] = False
            coming = _newcomers(rng, selected, dropped, count, int(count * reuse))
            current = current.copy()
            current[leaving] = np.array(coming, np.int32)
            dropped = (dropped + gone.tolist())[-RECENT * k :]
    return trace


def _newcomers(
    rng: np.random.Generator, selected: NDArray[np.bool_], dropped: list[int], count: int, num_reused: int
) -> list[int]:
    """`count` positions that are not selected, the first ones from those dropped last; marks them selected."""
    coming: list[int] = []
    for position in reversed(dropped):
        if len(coming) >= num_reused:
            break
        if not selected[position]:
            coming.append(position)
            selected[position] = True
    while len(coming) < count:
        position = int(rng.integers(selected.size))
        if not selected[position]:
            coming.append(position)
            selected[position] = True
    return coming
