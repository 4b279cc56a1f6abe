"""Sweeps and reports: every combination once, the same in one process and in two; hints; the figures' names."""

import json
from pathlib import Path

import numpy as np
import pytest

from hisparse.trace.hint import simulate_lru_with_hints
from hisparse.trace.report import KEYS, make_report, read_report
from hisparse.trace.simulator import simulate
from hisparse.trace.stream import make_stream
from hisparse.trace.sweep import Sweep, find_policy, run_sweep
from hisparse.trace.trace import Trace
from tests.trace.traces import drifting

SWEEP = Sweep(("lru", "two_rate_tier", "belady"), (12, 24), skip=10, record_bytes=100)


def test_processes_change_nothing() -> None:
    trace = drifting()
    alone, together = run_sweep(trace, SWEEP, workers=1), run_sweep(trace, SWEEP, workers=2)
    assert [(one.policy, one.size) for one in alone[0]] == [(p, s) for p in SWEEP.policies for s in SWEEP.sizes]
    for one, other in zip(alone[0], together[0], strict=True):
        assert one[:2] == other[:2]
        assert np.array_equal(one.misses, other.misses)
    assert alone[1] == together[1]


def test_the_report_names_its_figures() -> None:
    trace = drifting()
    report = json.loads(json.dumps(make_report(trace, SWEEP, workers=1)))
    assert set(KEYS) <= set(report)
    misses = run_sweep(trace, SWEEP, workers=1)[0][0].misses
    first = report["results"][0]
    assert (first["policy"], first["size"]) == ("lru", 12)
    assert first["miss_rate"] == pytest.approx(misses[10:].sum() / (50 * 3 * 12))
    assert first["misses"] == misses[10:].sum()
    assert first["fetched_bytes"] == 100 * first["misses"] == pytest.approx(50 * first["fetched_bytes_per_step"])
    assert len(first["miss_rate_by_step"]) == 60
    assert np.mean(first["miss_rate_by_layer"]) == pytest.approx(first["miss_rate"], abs=1e-5)
    assert [hint["size"] for hint in report["hints"]] == [12, 24]


def test_hints_are_judged_under_lru_whatever_is_simulated() -> None:
    with_lru, without = Sweep(("fifo", "lru"), (12, 24)), Sweep(("fifo",), (12, 24))
    outcomes, hints = run_sweep(drifting(), without, workers=1)
    assert [outcome.policy for outcome in outcomes] == ["fifo", "fifo"]
    assert hints == run_sweep(drifting(), with_lru, workers=1)[1]
    assert run_sweep(drifting(lines=1), with_lru, workers=1)[1] == []


def test_a_report_is_read_again(tmp_path: Path) -> None:
    report = make_report(drifting(steps=12), Sweep(("lru",), (12,)), workers=1)
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    assert read_report(path) == json.loads(json.dumps(report))
    for text, message in (("{", "is not JSON"), ("[]", "it lacks trace, about"), ('{"trace": 1}', "it lacks about")):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_report(path)
    with pytest.raises(ValueError, match="cannot be read: No such"):
        read_report(tmp_path / "other.json")


def test_a_hint_is_judged_by_what_is_missed() -> None:
    """Line 1 selects what line 0 does, line 2 something else: half of the hints help, and all misses of line 1."""
    rng = np.random.default_rng(0)
    selection = np.stack([np.sort(rng.permutation(100)[:6]) for _ in range(20)])
    both = np.stack([selection, selection, selection + 100], axis=1).astype(np.int32)
    trace = Trace("pairs", both, np.full(20, -1, np.int32), (0, 1, 2))
    stream = make_stream(trace)
    outcome, hint = simulate_lru_with_hints(stream, 6)
    assert hint.misses == outcome.misses[:, 1:].sum()
    assert np.array_equal(outcome.misses, simulate(stream, "lru", 6).misses)
    assert hint.useful * 2 == hint.misses
    assert hint.recall == 0.5
    assert hint.precision == pytest.approx(hint.useful / hint.hinted)
    assert hint.traffic == pytest.approx((hint.misses + hint.hinted - hint.useful) / hint.misses)
    assert simulate_lru_with_hints(stream, 6, skip=19)[1].misses <= 12


def test_names_of_policies() -> None:
    assert [find_policy(name) for name in ("s3-fifo", "S3FIFO", "lru2", "two-rate")] == [
        "s3_fifo",
        "s3_fifo",
        "lru_2",
        "two_rate",
    ]
    with pytest.raises(ValueError, match=r"--policies takes lru, .* got 'mru'"):
        find_policy("mru")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sweep((), (12,)), "at least one policy and one size"),
        (lambda: Sweep(("lru",), (12,), skip=-1), "skip must be at least 0, got -1"),
        (lambda: Sweep(("lru",), (12,), record_bytes=0), "record_bytes must be at least 1, got 0"),
        (lambda: Sweep(("lru",), (12,), skip=60).check(drifting()), "skip must leave some of the trace's 60 steps"),
        (lambda: Sweep(("lru",), (11,)).check(drifting()), "at least k = 12"),
    ],
)
def test_sweeps_that_cannot_be(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()
