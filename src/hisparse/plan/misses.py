"""How many of a step's selected records miss, by policy and reservation: a curve over B / k.

Built in: the paper's figures for GLM-5.1 (its Figure 6, a LongBenchV2 trace of 100,384 positions with k = 2048: LRU
30.0, 13.4 and 6.7 % at B = k, 2k and 4k; FIFO 17.2 and random 16.1 % at 2k). What it does not give, FIFO and random at
4k and the two-rate policies, is LRU's figure times the mean ratio to LRU on three real traces (SmolLM2-135M, k = 160,
LOG.md, `hisparse trace simulate`): 1.55 and 1.46 at 4k; 0.86, and 0.84 with the tier, at 2k and at 4k.
Between and beyond, rates follow a power of B; on those traces that is within 2 % of LRU's rate at 3k where it is 8.7 %.

A trace's own rates can take the curve's place: anything that yields a `MissCurve`.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

PAPER = "the paper's GLM-5.1 trace"
ALL_MISS = 1.0


@dataclass(frozen=True)
class MissCurve:
    """Misses as a share of k at some reservations.

    Args:
        source: where the rates come from, for people.
        points: (B / k, rate), two or more, with B / k ascending and rates above 0.

    Raises:
        ValueError: points that are no such curve.
    """

    source: str
    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        ratios = [ratio for ratio, _ in self.points]
        ascending = all(low < high for low, high in pairwise(ratios))
        if len(ratios) < 2 or not ascending or not all(0 < rate <= ALL_MISS for _, rate in self.points):
            raise ValueError(
                f"a miss curve has two or more points (B / k ascending, a rate above 0 and up to 1), got {self.points}"
            )

    def rate(self, buffer_over_k: float) -> float:
        """The rate at B / k: a power law between the two points around it, or the last two."""
        pairs = list(pairwise(self.points))
        (left, low), (right, high) = next((pair for pair in pairs if buffer_over_k <= pair[1][0]), pairs[-1])
        exponent = math.log(high / low) / math.log(right / left)
        return min(low * math.pow(buffer_over_k / left, exponent), ALL_MISS)


CALIBRATION = {
    "lru": MissCurve(PAPER, ((1, 0.300), (2, 0.134), (4, 0.067))),
    "fifo": MissCurve(f"{PAPER}; at 4k, its LRU times 1.55", ((1, 0.300), (2, 0.172), (4, 0.104))),
    "random": MissCurve(f"{PAPER}; at 4k, its LRU times 1.46", ((1, 0.300), (2, 0.161), (4, 0.098))),
    "two_rate": MissCurve(f"{PAPER}'s LRU, times 0.86", ((1, 0.300), (2, 0.115), (4, 0.057))),
    "two_rate_tier": MissCurve(f"{PAPER}'s LRU, times 0.84", ((1, 0.300), (2, 0.113), (4, 0.056))),
}


def calibrated(policy: str) -> MissCurve:
    """The built-in curve of a policy; LRU's, and saying so, for one that has none."""
    lru = CALIBRATION["lru"]
    return CALIBRATION.get(policy) or MissCurve(f"{lru.source}, LRU for want of {policy}", lru.points)


def miss_rate(curve: MissCurve, context: int, top_k: int, device_buffer_size: int) -> float:
    """The expected rate of a request of this length; nothing misses while its whole history fits."""
    return 0.0 if context <= device_buffer_size else curve.rate(device_buffer_size / top_k)
