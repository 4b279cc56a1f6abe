"""Lookups before claims, one fetch a row, and the miss plan."""

import torch

from hisparse.device_pool import SlotTables, fetched, hit
from hisparse.order import POLICIES
from hisparse.reference import Resolved, resolve
from hisparse.reference.rebuild_order import rebuild_order
from tests.reference.layers import NUM_ROWS, NUM_SLOTS, layer_with, rows_in

HOST = torch.arange(NUM_ROWS, dtype=torch.uint8)[:, None].repeat(1, 16)  # a row's bytes are its number
LRU = POLICIES["lru"]


def run(tables: SlotTables, rows: list[list[int]]) -> tuple[Resolved, torch.Tensor]:
    pool = torch.full((NUM_SLOTS, 16), 0xFF, dtype=torch.uint8)
    resident = tables.row_of_slot >= 0
    pool[resident] = HOST[tables.row_of_slot[resident].long()]
    return resolve(tables, torch.tensor(rows), 4, LRU, HOST, pool), pool


def test_a_claim_never_takes_a_slot_that_the_same_launch_hits() -> None:
    tables = layer_with({row: fetched(1) for row in range(6)})
    rebuild_order(tables, 3, LRU, listed_at=hit(3))
    resolved, pool = run(tables, [[20, 21, 0], [22, 1, -1]])  # misses come before hits of the best victims
    assert (resolved.hits, resolved.misses, resolved.failed) == (2, 3, 0)
    assert rows_in(tables) == {0, 1, 5, 20, 21, 22}
    assert resolved.slots[1, 2] == -1
    chosen = resolved.slots[resolved.slots >= 0].long()
    assert pool[chosen, 0].tolist() == [20, 21, 0, 22, 1]


def test_a_row_missed_twice_is_fetched_once_and_a_row_hit_twice_counts_twice() -> None:
    tables = layer_with({5: fetched(1)})
    resolved, _ = run(tables, [[9, 5], [5, 9]])
    assert (resolved.hits, resolved.misses) == (2, 1)
    assert torch.equal(resolved.slots[0], resolved.slots[1].flip(0))


def test_the_miss_plan_replayed_into_an_empty_pool_gives_the_fetched_records() -> None:
    tables = layer_with({row: fetched(1) for row in range(6)})
    resolved, pool = run(tables, [[30, 3, 31, 40]])
    assert resolved.exhausted  # no list was ever made
    assert resolved.miss_rows.tolist() == [30, 31, 40]
    assert torch.equal(pool[resolved.miss_slots], HOST[resolved.miss_rows])
    assert torch.equal(tables.slot_of_row[resolved.miss_rows].long(), resolved.miss_slots)


def test_rows_that_do_not_fit_are_counted_and_have_no_slot() -> None:
    tables = layer_with({row: hit(4) for row in range(4)})  # used in this step already
    resolved, _ = run(tables, [[20, 21, 22, 23]])
    assert (resolved.misses, resolved.failed) == (2, 2)
    assert (resolved.slots == -1).sum() == 2
    assert rows_in(tables) == {0, 1, 2, 3, 20, 21}
