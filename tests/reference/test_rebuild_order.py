"""The list of victims: the slots in use, best first, and when it must be made again."""

from hisparse.device_pool import fetched, hit
from hisparse.heat import RowHeat
from hisparse.order import POLICIES
from hisparse.reference.rebuild_order import order_is_due, rebuild_order
from tests.reference.layers import layer_with, listed_rows

LRU, FIFO = POLICIES["lru"], POLICIES["fifo"]


def test_slots_in_use_oldest_first_then_lower_row() -> None:
    tables = layer_with({30: 6, 10: 3, 20: 2, 5: 3})
    rebuild_order(tables, 4, LRU, listed_at=hit(3))
    assert listed_rows(tables) == [20, 5, 10, 30]
    assert (int(tables.listed), int(tables.cursor), int(tables.listed_at)) == (4, 0, 7)


def test_an_empty_pool_has_an_empty_list() -> None:
    tables = layer_with({})
    rebuild_order(tables, 1, LRU, listed_at=hit(1))
    assert listed_rows(tables) == []


def test_garbage_in_free_slots_is_not_looked_at() -> None:
    tables = layer_with({1: 4, 2: 3})
    tables.stamp[2:], tables.entered[2:] = -(2**31), 2**31 - 1
    heat = RowHeat(1, tables.slot_of_row.shape[0], tables.stamp.device)
    for policy in (heat.policy(policy, 0) if policy.heated else policy for policy in POLICIES.values()):
        rebuild_order(tables, 3, policy, listed_at=hit(3))
        assert sorted(listed_rows(tables)) == [1, 2]


def test_a_new_list_starts_from_its_beginning() -> None:
    tables = layer_with({1: 0, 2: 1, 3: 2})
    rebuild_order(tables, 1, LRU, listed_at=hit(1))
    tables.cursor.fill_(2)
    rebuild_order(tables, 1, LRU, listed_at=hit(1))
    assert listed_rows(tables) == [1, 2, 3]


def test_due_when_free_slots_and_list_are_fewer_than_half_the_pool() -> None:
    tables = layer_with({row: fetched(1) for row in range(6)})
    assert order_is_due(tables, LRU)  # nothing is listed yet
    rebuild_order(tables, 1, LRU, listed_at=hit(1))
    due = []
    for cursor in range(7):
        tables.cursor.fill_(cursor)
        due.append(order_is_due(tables, LRU))
    assert due == [False, False, False, False, True, True, True]
    tables.num_free.fill_(3)
    assert not order_is_due(tables, LRU)


def test_other_policies_are_always_due() -> None:
    tables = layer_with({1: 0})
    rebuild_order(tables, 1, FIFO, listed_at=hit(1))
    assert order_is_due(tables, FIFO)
    assert order_is_due(tables, POLICIES["random"])
