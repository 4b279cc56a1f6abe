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
    """A trace and how much of it is warm-up."""

    steps: int
    batch: int
    k: int
    context: int
    churn: float
    warm_steps: int  # not counted

    def make(self) -> NDArray[np.int32]:
        """The trace, int32 [steps, batch, k]."""
        return synth(self.steps, self.batch, self.k, self.context, self.churn)


SETTINGS = {
    "low": Setting(120, 16, 2048, 100_000, 0.13, 12),  # about 6.3 % misses at B = 2 k; batch 1, 4, 16
    "low-wide": Setting(60, 64, 2048, 40_000, 0.13, 6),  # the same for batch 32 and 64
    "high": Setting(60, 32, 2048, 100_000, 0.27, 6),  # about 13.2 %, the paper's rate
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
