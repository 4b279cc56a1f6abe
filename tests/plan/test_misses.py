"""Expected misses: the published points, power laws between them."""

import pytest

from hisparse.order import POLICIES
from hisparse.plan.misses import CALIBRATION, MissCurve, calibrated, miss_rate
from hisparse.trace.policies import SIMULATED


@pytest.mark.parametrize(
    ("policy", "ratio", "rate"),
    [("lru", 1, 0.30), ("lru", 2, 0.134), ("lru", 4, 0.067), ("fifo", 2, 0.172), ("random", 2, 0.161)],
)
def test_the_papers_points(policy: str, ratio: int, rate: float) -> None:
    assert calibrated(policy).rate(ratio) == pytest.approx(rate)


def test_power_laws_between_and_beyond() -> None:
    curve = MissCurve("a test", ((1, 0.4), (2, 0.2), (4, 0.05)))
    assert curve.rate(1.5) == pytest.approx(0.4 / 1.5)
    assert curve.rate(3) == pytest.approx(0.2 / 1.5**2)
    assert curve.rate(8) == pytest.approx(0.0125)
    assert curve.rate(0.1) == 1.0  # a rate, whatever the power law says


def test_every_policy_of_the_cache_has_figures_and_is_simulated() -> None:
    assert set(CALIBRATION) == set(POLICIES) <= set(SIMULATED)


@pytest.mark.parametrize("policy", CALIBRATION)
def test_more_slots_miss_less(policy: str) -> None:
    rates = [calibrated(policy).rate(ratio / 4) for ratio in range(4, 40)]
    assert rates == sorted(rates, reverse=True)


def test_a_policy_without_figures_takes_lrus_and_says_so() -> None:
    curve = calibrated("clock")
    assert curve.rate(2) == calibrated("lru").rate(2)
    assert "LRU for want of clock" in curve.source


def test_nothing_misses_while_the_history_fits() -> None:
    assert miss_rate(calibrated("lru"), 4096, 2048, 4096) == 0
    assert miss_rate(calibrated("lru"), 4097, 2048, 4096) == pytest.approx(0.134)


@pytest.mark.parametrize("points", [((2, 0.1),), ((2, 0.1), (2, 0.05)), ((4, 0.1), (2, 0.2)), ((2, 0.1), (4, 0.0))])
def test_what_is_no_curve_is_refused(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ValueError, match="two or more points"):
        MissCurve("a test", points)
