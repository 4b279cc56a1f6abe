"""Order functions: whose key is lowest."""

import pytest
import torch

from hisparse.device_pool import DevicePool, SlotTables
from hisparse.order import POLICIES
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
    }
    assert all(policy.name == name for name, policy in POLICIES.items())
