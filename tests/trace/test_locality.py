"""Overlap and reuse, counted by hand."""

import numpy as np
import pytest

from hisparse.trace.locality import locality
from hisparse.trace.trace import Trace
from tests.trace.traces import drifting


def test_a_small_trace_by_hand() -> None:
    selection = np.array(
        [
            [[0, 1, 2], [0, 1, 5]],
            [[0, 1, 3], [0, 6, 7]],
            [[2, 3, 4], [6, 7, -1]],
        ],
        np.int32,
    )
    found = locality(Trace("small", selection, np.full(3, -1, np.int32), (0, 1)))
    assert found["overlap"]["by_layer"] == pytest.approx([(2 / 3 + 1 / 3) / 2, (1 / 3 + 1) / 2], abs=1e-5)
    assert found["overlap"]["by_step"] == pytest.approx([1 / 2, 2 / 3], abs=1e-5)
    assert sum(found["overlap"]["histogram"]) == 4
    assert found["layer_overlap"] == pytest.approx((1 / 3 + 0) / 2)
    counts = {tuple(bar["steps"]): bar["count"] for bar in found["reuse"]}
    assert counts[1, 1] == 2 + 1 + 1 + 2
    assert counts[2, 2] == 1
    assert found["first_uses"] == 1 + 2 + 1
    assert sum(counts.values()) + found["first_uses"] == 11


def test_skipped_steps_do_not_count_but_are_known() -> None:
    trace = drifting(steps=20)
    total = 10 * trace.num_lines * trace.k
    found = locality(trace, skip=10)
    assert sum(bar["count"] for bar in found["reuse"]) + found["first_uses"] == total
    assert len(found["overlap"]["by_step"]) == 10
    brute = [
        len(set(trace.selection[step, line]) & set(trace.selection[step - 1, line])) / trace.k
        for step in range(10, 20)
        for line in range(3)
    ]
    assert found["overlap"]["mean"] == pytest.approx(np.mean(brute))


def test_one_step_has_nothing_in_common() -> None:
    assert locality(drifting(steps=1)) == {}
