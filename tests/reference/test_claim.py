"""Who gives way to whom."""

import pytest
import torch

from hisparse.device_pool import SlotTables, fetched, hit
from hisparse.order import POLICIES, Policy
from hisparse.reference.claim import Claim, claim, pop_free
from hisparse.reference.rebuild_order import rebuild_order
from tests.reference.layers import layer_with, rows_in

LRU, FIFO = POLICIES["lru"], POLICIES["fifo"]
FULL = {10: fetched(1), 11: hit(1), 12: fetched(2), 13: hit(2), 14: fetched(3), 15: hit(3)}


def claim_rows(tables: SlotTables, rows: list[int], step: int = 4) -> Claim:
    return claim(tables, torch.tensor(rows, dtype=torch.int64), step, LRU)


def test_free_slots_first_then_the_list() -> None:
    tables = layer_with(dict(list(FULL.items())[:4]))
    rebuild_order(tables, 3, LRU, listed_at=hit(3))
    claimed = claim_rows(tables, [1, 2, 3])
    assert not claimed.exhausted
    assert set(claimed.slots[:2].tolist()) == {4, 5}
    assert rows_in(tables) == {11, 12, 13, 1, 2, 3}
    assert tables.num_free == 0
    for row in (1, 2, 3):
        slot = int(tables.slot_of_row[row])
        assert tables.stamp[slot] == tables.entered[slot] == fetched(4)


def test_nothing_to_claim_changes_nothing() -> None:
    tables = layer_with(FULL)
    rebuild_order(tables, 3, LRU, listed_at=hit(3))
    before = [table.clone() for table in tables]
    claimed = claim_rows(tables, [])
    assert (claimed.slots.tolist(), claimed.exhausted) == ([], False)
    assert all(torch.equal(a, b) for a, b in zip(before, tables, strict=True))


def test_slots_touched_since_the_list_was_made_are_passed_over() -> None:
    tables = layer_with(FULL)
    rebuild_order(tables, 3, LRU, listed_at=hit(3))
    tables.stamp[[0, 2]] = hit(4)  # rows 10 and 12
    claim_rows(tables, [1, 2])
    assert rows_in(tables) == {10, 12, 14, 15, 1, 2}
    assert tables.cursor == 4


def test_entries_of_slots_that_became_free_are_passed_over() -> None:
    tables = layer_with(FULL)
    rebuild_order(tables, 3, LRU, listed_at=hit(3))
    tables.row_of_slot[0] = tables.stamp[0] = tables.slot_of_row[10] = -1  # freed, and nobody took it yet
    claim_rows(tables, [1])
    assert rows_in(tables) == {12, 13, 14, 15, 1}


def test_a_list_that_runs_out_is_made_again_without_the_slots_just_taken() -> None:
    tables = layer_with(FULL)
    rebuild_order(tables, 3, LRU, listed_at=hit(3))
    tables.cursor.fill_(4)
    claimed = claim_rows(tables, [1, 2, 3, 4])
    assert claimed.exhausted
    assert claimed.slots.unique().numel() == 4
    assert rows_in(tables) == {12, 13, 1, 2, 3, 4}  # 14 and 15 from the list, then 10 and 11


@pytest.mark.parametrize("policy", [LRU, FIFO], ids=["lru", "fifo"])
def test_slots_used_in_this_step_never_leave_and_the_claim_ends(policy: Policy) -> None:
    tables = layer_with(FULL)
    tables.stamp[[1, 3, 5]] = hit(4)
    tables.stamp[0] = fetched(4)
    rows = torch.arange(1, 5)
    claimed = claim(tables, rows, 4, policy)
    assert claimed.exhausted
    assert sorted(claimed.slots.tolist()) == [2, 4]  # fewer than asked for
    assert rows_in(tables) == {10, 11, 13, 15, 1, 2}
    assert claim(tables, torch.tensor([5]), 4, policy).slots.numel() == 0


@pytest.mark.parametrize(("count", "taken"), [(0, 0), (1, 1), (3, 3), (5, 3)])
def test_pop_free(count: int, taken: int) -> None:
    tables = layer_with(dict(list(FULL.items())[:3]))
    slots = pop_free(tables, count)
    assert len(set(slots.tolist()) & {3, 4, 5}) == taken == len(slots)
    assert tables.num_free == 3 - taken
