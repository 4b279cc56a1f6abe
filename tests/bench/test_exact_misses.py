"""The specification's misses against textbook replacement in dictionaries."""

from dataclasses import replace

import numpy as np
import pytest

from hisparse.bench.exact_misses import exact_misses
from hisparse.bench.resolve_setup import Setup
from hisparse.bench.synth import Setting
from hisparse.bench.trace import generated
from hisparse.layout import PAGE_RECORDS
from tests.oracle import LayerOracle


def oracle_misses(setup: Setup, batch: int) -> float:
    oracle = LayerOracle(batch * setup.buffer, setup.policy)
    stride, warm = setup.pages_each * PAGE_RECORDS, 0
    for step, selected in enumerate(setup.trace.selections[:, 0, :batch], start=1):
        oracle.resolve([request * stride + int(at) for request, line in enumerate(selected) for at in line], step)
        warm = oracle.misses if step == setup.warm_steps else warm
    return (oracle.misses - warm) / setup.counted_steps


@pytest.mark.parametrize("policy", ["lru", "fifo"])
@pytest.mark.parametrize("buffer", [17, 24, 40])
@pytest.mark.parametrize("warm_steps", [0, 5])
def test_counts_agree_with_the_oracle(policy: str, buffer: int, warm_steps: int) -> None:
    trace = generated("tiny", Setting(steps=25, batch=3, k=16, context=90, churn=0.4))
    setup = Setup(trace, buffer, 16, warm_steps, policy, layers=4)
    assert exact_misses(setup, 2) == oracle_misses(setup, 2) > 0


def test_layers_with_their_own_selections_count_each() -> None:
    one = generated("tiny", Setting(steps=25, batch=2, k=16, context=90, churn=0.4))
    other = generated("tiny", Setting(steps=25, batch=2, k=16, context=90, churn=0.1))
    both = replace(one, layers=2, make=lambda: np.concatenate([one.selections, other.selections], 1))
    counts = [exact_misses(Setup(trace, 24, 16, 2, layers=2), 2) for trace in (one, other, both)]
    assert counts[2] == sum(counts[:2]) / 2
    assert counts[0] > counts[1]
