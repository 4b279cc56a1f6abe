"""The decode bench on a GPU: it compares what attention reads with the resident column by itself."""

import pytest

from hisparse.bench.decode import bench
from hisparse.bench.decode_setup import COLUMNS, DecodeSetup

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("fp8", "policy"), [(False, "lru"), (True, "lru"), (False, "two_rate_tier")])
def test_all_columns(fp8: bool, policy: str) -> None:
    setup = DecodeSetup(
        model="glm-5.2-slice", batch=3, context=6000, churn=0.2, steps=4, warm_steps=2, rounds=2, other_us=50.0,
        early_us=10.0, layers=12, fp8=fp8, policy=policy,
    )  # fmt: skip
    first, second = bench([setup, setup])
    for result in (first, second):
        assert all(result[f"us_{column}"] > 0 for column in COLUMNS)
        assert 0 < result["miss_rate"] < 0.5
    assert first["misses"] == pytest.approx(second["misses"], rel=0.02)  # ties have no order on a GPU
