"""A bench's sizes are checked before anything is made, and it says what it will take."""

from dataclasses import replace
from typing import Any

import pytest

from hisparse.bench.resolve_setup import Setup, check_batches, default_batches, what_is_needed
from hisparse.bench.synth import SETTINGS, Setting
from hisparse.bench.trace import SelectionTrace, generated


def never() -> Any:
    raise AssertionError("the trace was made")


@pytest.fixture
def trace() -> SelectionTrace:
    return replace(generated("low", SETTINGS["low"]), make=never)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"buffer": 2048}, "device_buffer_size must be above top_k"),
        ({"record_bytes": 1000}, "record_bytes must be a multiple of 16, got 1000"),
        ({"layers": 0}, "num_layers must be a positive whole number, got 0"),
        ({"policy": "best"}, "policy must be one of lru, fifo, random, two_rate, two_rate_tier, got 'best'"),
        ({"warm_steps": 119}, "warm_steps must be from 0 to 118, so that of 120 steps 2 count, got 119"),
        ({"warm_steps": -1}, "got -1"),
    ],
)
def test_wrong_sizes(trace: SelectionTrace, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Setup(**{"trace": trace, "buffer": 4096, "record_bytes": 1152, "warm_steps": 12, **changes})


def test_layers_are_those_of_a_trace_with_several(trace: SelectionTrace) -> None:
    with pytest.raises(ValueError, match="layers must be 4, those of the trace, got 16"):
        Setup(replace(trace, layers=4), 4096, 1152, 12)


def test_batches(trace: SelectionTrace) -> None:
    assert default_batches(trace) == (1, 4, 16)
    assert default_batches(replace(trace, batch=64)) == (1, 4, 16, 32, 64)
    assert default_batches(replace(trace, batch=8)) == (1, 4, 8)
    for batch in (0, 17):
        with pytest.raises(ValueError, match=f"from 1 to 16, the requests of the trace, got {batch}"):
            check_batches(trace, [1, batch])


def test_what_is_needed() -> None:
    setup = Setup(generated("small", Setting(10, 4, 1024, 2**16, 0.1)), 2048, 1024, 1, layers=2)
    assert what_is_needed(setup, [(2048, 1), (4096, 4), (2048, 2)]) == (
        "pins 1.25 GiB of host memory (0.25 for the records of 4 requests, 1.00 for the plain copy), "
        "takes 1.28 GiB of device memory"
    )
