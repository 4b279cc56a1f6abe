"""The resolve bench on a GPU: small, whole, and right."""

import pytest

from hisparse.bench.resolve import bench
from hisparse.bench.resolve_setup import Setup
from hisparse.bench.resolve_sweep import sweep
from hisparse.bench.synth import Setting
from hisparse.bench.trace import generated
from tests.bench.test_resolve import KEYS

pytestmark = pytest.mark.gpu


@pytest.fixture
def setup() -> Setup:
    trace = generated("tiny", Setting(steps=12, batch=4, k=64, context=1000, churn=0.3))
    return Setup(trace, buffer=128, record_bytes=1152, warm_steps=1, layers=2, exact_misses=True)


def test_bench(setup: Setup) -> None:
    for result in bench(setup, [1, 4]):
        assert result.keys() == KEYS | {"misses_exact_lru", "miss_ratio"}
        assert (result["checked"], result["failed"]) == (True, 0)
        assert 0 < result["us_launch"] < result["us"]
        assert result["miss_ratio"] == pytest.approx(1, abs=0.05)  # a tiny trace, and ties have no order on a GPU


def test_cold_start_and_an_odd_number_of_layers(setup: Setup) -> None:
    """Without warm-up the capture is the first launch of some kernels; one layer makes one group."""
    for layers in (1, 3):
        cold = Setup(setup.trace, 65, 16, warm_steps=0, layers=layers, check=False)
        (result,) = bench(cold, [2])
        assert (result["checked"], result["failed"]) == (False, 0)


def test_sweep(setup: Setup) -> None:
    lines = list(sweep(setup, 2))
    assert {line["buffer"] for line in lines} == {65, 96, 128, 192, 256}
    assert {line["batch"] for line in lines} == {1, 2, 4}
