"""Order functions: whose key is lowest."""

from typing import NamedTuple

import pytest
import torch

from hisparse.device_pool import DevicePool, SlotTables
from hisparse.order import (
    FINER,
    HOT,
    POLICIES,
    SLOW,
    SLOW_BITS,
    SLOW_MASK,
    entry_heat,
    two_rate_keys,
    warm,
)
from tests.caches import small_layout

ROWS = [9, 3, 7, 1, 5, 0]


def tables(stamp: list[int], entered: list[int], rows: list[int] | None = None) -> SlotTables:
    """One layer with these six slots."""
    layer = DevicePool(small_layout(num_layers=1, max_requests=1), torch.device("cpu")).layer(0)
    layer.row_of_slot.copy_(torch.tensor(rows or ROWS))
    layer.stamp.copy_(torch.tensor(stamp))
    layer.entered.copy_(torch.tensor(entered))
    return layer


def ranked(policy: str, layer: SlotTables, step: int = 1) -> list[int]:
    keys = POLICIES[policy].keys(layer, step)
    assert keys.dtype == torch.int64
    assert keys.unique().numel() == keys.numel()
    return keys.argsort().tolist()


def test_lru_ranks_by_last_use() -> None:
    layer = tables(stamp=[6, 5, 4, 3, 2, 1], entered=[0, 1, 2, 3, 4, 5])
    assert ranked("lru", layer) == [5, 4, 3, 2, 1, 0]


def test_fifo_ranks_by_entry() -> None:
    layer = tables(stamp=[6, 5, 4, 3, 2, 1], entered=[0, 1, 2, 3, 4, 5])
    assert ranked("fifo", layer) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("policy", ["lru", "fifo"])
def test_ties_go_to_the_lower_row(policy: str) -> None:
    layer = tables(stamp=[4] * 6, entered=[4] * 6)
    assert [ROWS[slot] for slot in ranked(policy, layer)] == sorted(ROWS)


@pytest.mark.parametrize("policy", ["lru", "fifo"])
def test_the_largest_stamps_and_rows_do_not_overflow(policy: str) -> None:
    last = 2**31 - 1
    times = [last, last, last - 1, 0, 0, 1]
    layer = tables(stamp=times, entered=times, rows=[last, last - 1, last - 2, last - 3, 0, last - 4])
    assert ranked(policy, layer) == [4, 3, 5, 2, 1, 0]


def test_random_depends_on_slot_and_step_alone() -> None:
    layer, other = tables([1] * 6, [1] * 6), tables([5, 4, 3, 2, 1, 0], [2] * 6, rows=sorted(ROWS))
    assert ranked("random", layer, step=7) == ranked("random", other, step=7)
    orders = {tuple(ranked("random", layer, step)) for step in range(50)}
    assert len(orders) > 40
    assert {order[0] for order in orders} == set(range(6))  # every slot comes first at some step


def test_random_near_the_last_step() -> None:
    assert sorted(ranked("random", tables([1] * 6, [1] * 6), step=2**30 - 2)) == list(range(6))


def test_only_recency_lists_may_be_used_again() -> None:
    assert {name: policy.by_recency for name, policy in POLICIES.items()} == {
        "lru": True,
        "fifo": False,
        "random": False,
        "two_rate": False,
        "two_rate_tier": False,
    }
    assert all(policy.name == name for name, policy in POLICIES.items())


def packed(fast: int, slow: int) -> int:
    return fast << SLOW_BITS | slow


def test_heat_moves_towards_what_it_is_told() -> None:
    heat = torch.tensor([0, packed(HOT, SLOW_MASK), packed(400, 6400)], dtype=torch.int32)
    warmer = warm(heat, torch.tensor([HOT, HOT, 0], dtype=torch.int32))
    expected = [packed(HOT >> 2, (HOT << FINER) >> SLOW), packed(HOT, SLOW_MASK - 1), packed(300, 6300)]
    assert warmer.dtype == torch.int32
    assert warmer.tolist() == expected
    for _ in range(2000):
        heat = warm(heat, 0)
    assert heat.tolist() == [0, 0, 0]
    for _ in range(2000):
        heat = warm(heat, HOT)
        assert (heat >= 0).all()
    fast, slow = heat >> SLOW_BITS, heat & SLOW_MASK
    assert (fast >= HOT - 3).all()
    assert (slow >= (HOT << FINER) - (1 << SLOW)).all()


def test_a_record_that_comes_back_is_remembered() -> None:
    slow = torch.tensor([0, 100_000, 100_000, 100_000], dtype=torch.int32)
    away = torch.tensor([5, 0, 44, 5000], dtype=torch.int32)
    heat = entry_heat(slow, away)
    assert (heat >> SLOW_BITS).tolist() == [HOT >> 2] * 4
    new, same, half, gone = (heat & SLOW_MASK).tolist()
    assert new == gone == (HOT << FINER) >> SLOW
    assert same > half > gone
    assert half - new == pytest.approx(50_000, rel=0.03)


def test_two_rate_ranks_by_what_comes_next() -> None:
    class Heated(NamedTuple):
        row_of_slot: torch.Tensor
        stamp: torch.Tensor
        entered: torch.Tensor
        heat: torch.Tensor

    heat = torch.tensor([packed(100, 0), packed(0, 160 << FINER), packed(0, 150 << FINER), 0, 0], dtype=torch.int32)
    rows = torch.tensor([4, 3, 2, 1, 0], dtype=torch.int32)
    keys = two_rate_keys(Heated(rows, rows, rows, heat), 0)
    assert keys.dtype == torch.int64
    assert keys.argsort().tolist() == [4, 3, 2, 0, 1]  # a fast 100 will be 75 and counts twice, a slow 150 will be 148
