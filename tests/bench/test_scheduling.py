"""The bench of scheduling runs its cases; what it measures is not a test's business."""

from hisparse.bench.scheduling import measure


def test_cases() -> None:
    rows = list(measure(repeats=2, num_running=8))
    assert sum(str(row["case"]).startswith("schedule: ") for row in rows) == 4
    assert {row["running"] for row in rows} == {8}
