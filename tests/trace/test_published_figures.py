"""Miss rates of whole recorded traces against what was published with them, where the traces are at hand.

They are not part of the repository: HISPARSE_TRACES names their folder, or they lie in ../shared/traces.
"""

import os
from pathlib import Path

import pytest

from hisparse.trace.read import open_trace
from hisparse.trace.simulator import simulate
from hisparse.trace.stream import Stream, make_stream

FOLDER = Path(os.environ.get("HISPARSE_TRACES", Path(__file__).parents[3] / "shared" / "traces"))
NAMES = ("austen_tf", "code_tf", "code_gen")
K, SKIP = 160, 100
PUBLISHED = {  # percent of k at B = 2k over steps 100 to 599
    "lru": (13.88, 13.91, 8.30),
    "lru_paper": (13.73, 13.73, 8.22),
    "fifo": (17.84, 17.92, 11.61),
    "random": (16.21, 16.59, 10.20),
    "clock": (13.42, 13.47, 8.09),
    "sieve": (12.74, 13.34, 7.71),
    "s3_fifo": (12.50, 13.29, 7.55),
    "lru_2": (12.57, 13.12, 7.65),
    "lrfu": (11.59, 12.91, 6.93),
    "lrfu_resident": (11.84, 13.61, 7.08),
    "two_rate_resident": (11.91, 12.82, 6.94),
    "two_rate_resident_tier": (11.46, 12.68, 6.70),
    "belady": (8.26, 7.96, 4.38),
}
AT_4K = {"lru": (6.10, 5.74, 2.13), "lrfu": (5.30, 5.22, 1.88), "belady": (3.03, 2.74, 0.85)}

pytestmark = pytest.mark.skipif(not (FOLDER / "austen_tf.npz").exists(), reason="the recorded traces are not here")


@pytest.fixture(scope="module")
def streams() -> list[Stream]:
    return [make_stream(open_trace(FOLDER / f"{name}.npz", K)) for name in NAMES]


def rate(stream: Stream, policy: str, size: int = 2 * K) -> float:
    return float(100 * simulate(stream, policy, size).misses[SKIP:].mean() / K)


@pytest.mark.parametrize("policy", PUBLISHED)
def test_one_trace_under_every_policy(streams: list[Stream], policy: str) -> None:
    assert rate(streams[1], policy) == pytest.approx(PUBLISHED[policy][1], abs=0.3 if policy == "random" else 0.1)


@pytest.mark.parametrize("policy", ["lru", "belady"])
def test_the_others_under_some(streams: list[Stream], policy: str) -> None:
    for trace in (0, 2):
        assert rate(streams[trace], policy) == pytest.approx(PUBLISHED[policy][trace], abs=0.1)


@pytest.mark.parametrize("policy", AT_4K)
def test_larger_pools(streams: list[Stream], policy: str) -> None:
    assert rate(streams[2], policy, 4 * K) == pytest.approx(AT_4K[policy][2], abs=0.1)


@pytest.mark.parametrize(("policy", "least", "on_average"), [("two_rate", 7, 12), ("two_rate_tier", 8, 14)])
def test_two_rate_misses_less(streams: list[Stream], policy: str, least: float, on_average: float) -> None:
    fewer = [100 * (1 - rate(stream, policy) / rate(stream, "lru")) for stream in streams]
    assert min(fewer) >= least, fewer
    assert sum(fewer) / len(fewer) >= on_average, fewer
