"""The reference bench runs and counts what it says; what it measures is not a test's business."""

from hisparse.bench.reference import BATCH, TOP_K, measure


def test_cases_and_their_misses() -> None:
    rows = {str(row["case"]): row for row in measure(repeats=2)}
    assert rows.keys() == {"churn", "drift"}
    misses = {case: int(str(row["misses"])) for case, row in rows.items()}
    assert 0 < misses["drift"] < BATCH * TOP_K // 4 < misses["churn"] <= BATCH * TOP_K
