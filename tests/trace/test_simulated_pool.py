"""Who leaves: exactly as many as asked for in each line, whatever the keys."""

import numpy as np
import pytest

from hisparse.trace.simulated_pool import SimulatedPool
from hisparse.trace.stream import make_stream
from tests.trace.traces import drifting

LINES, SIZE, STEP = 3, 13, 7


def filled_pool() -> SimulatedPool:
    """13 residents in 14 slots of each line; the step has used the first four of every line."""
    pool = SimulatedPool(make_stream(drifting(lines=LINES)), SIZE)
    rows = np.arange(LINES)[:, None] * pool.num_rows + np.arange(SIZE)
    slots = pool.enter(rows.reshape(-1)).reshape(LINES, SIZE)
    pool.used_at[slots[:, 4:]] = STEP - 1
    pool.used_at[slots[:, :4]] = STEP
    return pool


@pytest.mark.parametrize("dtype", [np.int64, np.float64])
@pytest.mark.parametrize("spread", [1000, 3, 1])
def test_the_lowest_leave_and_of_equals_the_first(dtype: type, spread: int) -> None:
    pool, rng = filled_pool(), np.random.default_rng(spread)
    for counts in (np.array([0, 1, 9]), np.array([5, 5, 5]), np.array([0, 0, 2])):
        keys: np.ndarray = rng.integers(-spread, spread, pool.shape).astype(dtype)
        expected = []
        for line, count in enumerate(counts):
            ranked = sorted(range(4, SIZE), key=lambda slot, line=line: (keys[line, slot], slot))  # type: ignore[misc]
            expected += sorted(line * pool.num_slots + slot for slot in ranked[:count])
        assert pool.lowest(keys, counts, STEP).tolist() == expected


def test_nobody_leaves_if_nobody_has_to() -> None:
    pool = filled_pool()
    assert len(pool.lowest(np.zeros(pool.shape, np.int64), np.zeros(LINES, np.int64), STEP)) == 0


def test_records_enter_the_first_free_slots_of_their_line() -> None:
    pool = filled_pool()
    pool.leave(np.array([2, 5, pool.num_slots + 1]))
    entered = pool.enter(np.array([50, 51, pool.num_rows + 50, 2 * pool.num_rows + 50]))
    assert entered.tolist() == [2, 5, pool.num_slots + 1, 3 * pool.num_slots - 1]
    assert pool.may_leave(STEP)[0].tolist() == [False, False, True, False] + [True] * 9 + [False]
