"""The two-rate policy in the cache: the same misses as the simulator's, over a recorded trace and any schedule."""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import numpy as np
import pytest
import torch

from hisparse.cache import HierarchicalCache
from hisparse.device_pool import FREE, DevicePool, fetched, hit
from hisparse.heat import RowHeat, mark_ranked
from hisparse.layout import CacheLayout, num_pages_for
from hisparse.order import HOT, POLICIES, SLOW_BITS
from hisparse.ranking import Ranking
from hisparse.trace.read import open_trace
from hisparse.trace.simulator import simulate
from hisparse.trace.stream import make_stream
from hisparse.trace.trace import Trace
from tests.caches import CHURN, new_driver, small_layout
from tests.trace.traces import CUT

NEAR = {  # policy: the simulator's name for it, and how near they must come, in points
    "two_rate": ("two_rate", 0.1),
    "two_rate_tier": ("two_rate_tier", 0.1),
    "lru": ("lru_paper", 0.1),
    "fifo": ("fifo", 0.7),  # a new record's victim is taken before the step has selected, and may be selected then
    "random": ("random", 0.4),
}


def best_of(trace: Trace, step: int, line: int, count: int) -> Ranking:
    """The best positions of a selection, which are all that a policy looks at."""
    assert trace.runners_up is not None
    assert count == 2 * trace.k
    positions = np.concatenate((trace.selection[step, line], trace.runners_up[step, line]))
    ranked = torch.from_numpy(positions)[None].to(torch.get_default_device())
    return Ranking(ranked, torch.zeros(ranked.shape))


def cache_misses(trace: Trace, policy: str, size: int) -> np.ndarray:
    """[steps, lines] misses of a cache with a slot more than `size`, the newest position's, that replays the trace."""
    steps, start = trace.num_steps, int(trace.newest[0])
    pages = num_pages_for(start + steps)
    layout = CacheLayout(trace.num_lines, 16, trace.k, size + 1, 1, pages)
    device = torch.get_default_device()
    cache = HierarchicalCache(layout, policy=policy, device=device)
    request = cache.admit(start + steps)
    for line in range(trace.num_lines):  # no slot keeps what is staged: the pool is empty when decoding begins
        cache.stage(line, request, 0, torch.zeros(start, 16, dtype=torch.uint8))
    cache.retract(request)
    cache.resume(request)
    counts = np.zeros((steps, trace.num_lines), np.int64)
    for step in range(steps):
        before = [cache.statistics(line).misses for line in range(trace.num_lines)]
        with cache.step([request]):
            for line in range(trace.num_lines):
                cache.append(line, torch.zeros(1, 16, dtype=torch.uint8))
                selection = torch.from_numpy(trace.selection[step, line])[None].to(device)
                cache.resolve(line, selection, partial(best_of, trace, step, line))
        counts[step] = [cache.statistics(line).misses - count for line, count in enumerate(before)]
    cache.check_integrity()
    return counts


@pytest.mark.usefixtures("each_backend")
@pytest.mark.parametrize("policy", NEAR)
def test_the_cache_misses_what_the_simulator_does(policy: str) -> None:
    trace = open_trace(CUT).of_lines((3, 14))
    name, points = NEAR[policy]
    inside = cache_misses(trace, policy, 320)[20:].mean() / trace.k
    simulated = simulate(make_stream(trace), name, 320).misses[20:].mean() / trace.k
    assert 100 * inside == pytest.approx(100 * simulated, abs=points)


def test_heat_is_kept_by_row() -> None:
    tables = DevicePool(small_layout(num_layers=1, max_requests=1), torch.device("cpu")).layer(0)
    heat = RowHeat(1, 512, torch.device("cpu"))
    policy = heat.policy(POLICIES["two_rate"], 0)

    def now(step: int, rows: Sequence[int], selected: Sequence[int], came: Sequence[int]) -> list[int]:
        tables.row_of_slot.fill_(-1)
        for slot, row in enumerate(rows):
            tables.row_of_slot[slot] = row
            tables.entered[slot] = fetched(step if row in came else step - 1)
            tables.stamp[slot] = hit(step) if row in selected else fetched(step) if row in came else hit(step - 1)
        heat.end_step(0, tables, step)
        return [int(heat._heat[0, row]) for row in rows]

    first = now(1, [7, 9], [], [7, 9])
    assert [value >> SLOW_BITS for value in first] == [HOT >> 2] * 2
    second = now(2, [7, 9], [7], [])
    assert second[0] > first[0] > second[1]
    assert policy.keys(tables, 2)[:2].argsort().tolist() == [1, 0]
    third = now(3, [9, 5], [9], [5])  # row 7 leaves
    again = now(4, [9, 7], [], [7])
    assert again[1] > third[1]  # row 7 comes back, and is remembered; row 5 was new
    heat.forget(torch.tensor([-1, 7]))
    assert heat._heat[0, 7] == 0


@pytest.mark.usefixtures("each_backend")
def test_ranks_that_cannot_be_had_undo_the_step() -> None:
    """A shared layer has by then what its anchor's tables say, or has it when the step is undone."""
    driver = new_driver(policy="two_rate_tier", num_layers=3, anchors=(0, 0, 2))
    request = driver.admit(staged=20)
    driver.admit(staged=20)
    device = torch.get_default_device()

    def no_memory(count: int) -> Ranking:
        raise MemoryError

    for selection in CHURN:
        driver.step({request: selection})
        length = request.length
        with suppress(MemoryError), driver.cache.step([request]) as step:
            driver.append(step)
            driver.cache.resolve(0, torch.tensor([[15, 16, 17, 18]], dtype=torch.int32, device=device), no_memory)
        assert request.length == length
        driver.cache.check_integrity()


@pytest.mark.usefixtures("each_backend")
@pytest.mark.parametrize("policy", ["two_rate", "two_rate_tier"])
def test_slots_are_right_under_two_rate(policy: str) -> None:
    driver = new_driver(policy=policy)
    first, second = driver.admit(staged=20), driver.admit(staged=20)
    for step, selection in enumerate(CHURN * 3):
        driver.step({first: selection, second: [position + step % 3 for position in selection]})
    driver.cache.retract(first)
    driver.step({second: [0, 1]})
    driver.cache.resume(first)
    driver.step({first: [19, 3], second: [0, 1]})
    driver.cache.check_integrity()


@pytest.mark.usefixtures("each_backend")
def test_what_is_ranked_next_cools_more_slowly() -> None:
    device = torch.get_default_device()
    tables = DevicePool(small_layout(num_layers=1, max_requests=1), device).layer(0)
    for slot, row in enumerate((4, 5, 6)):
        tables.row_of_slot[slot], tables.slot_of_row[row] = row, slot
        tables.stamp[slot] = tables.entered[slot] = hit(1)
    tables.stamp[2] = hit(2)
    best, pages = torch.tensor([[6, 5, 400, -1]], dtype=torch.int32), torch.arange(8)[None]
    mark_ranked(tables, best, pages, 2)  # 6 is selected, 5 comes next, 400 is nowhere
    assert tables.stamp[:4].tolist() == [hit(1), fetched(2), hit(2), FREE]
    heat = RowHeat(1, 512, device)
    heat.end_step(0, tables, 2)
    cold, warm, hot = heat._heat[0, 4:7].tolist()
    assert 0 == cold < warm < hot
    for wrong in (best[0], best.long(), best.expand(2, -1)):
        with pytest.raises(ValueError, match=r"best must give positions int32 \[1, n\], got"):
            mark_ranked(tables, wrong, pages, 2)


def test_stamps_that_are_renumbered_change_no_ranks() -> None:
    driver = new_driver(policy="two_rate")
    request = driver.admit(staged=20)
    for selection in CHURN:
        driver.step({request: selection})
    backend = driver.cache.backend
    backend.step_number = backend.device_pool.rebase_stamps()
    for selection in CHURN:
        driver.step({request: selection})
    driver.cache.check_integrity()


def test_the_order_function_needs_heat() -> None:
    tables = DevicePool(small_layout(num_layers=1, max_requests=1), torch.device("cpu")).layer(0)
    with pytest.raises(ValueError, match="ranks by heat"):
        POLICIES["two_rate"].keys(tables, 0)
