"""Slots come back once, whichever rows are named."""

import torch

from hisparse.device_pool import FREE
from hisparse.reference import release
from tests.reference.layers import layer_with, rows_in


def test_rows_in_no_slot_are_passed_over() -> None:
    tables = layer_with({10: 2, 11: 3, 12: 4})
    release(tables, torch.tensor([11, 40, 12]))
    assert rows_in(tables) == {10}
    assert sorted(tables.free[: int(tables.num_free)].tolist()) == [1, 2, 3, 4, 5]
    assert tables.stamp.tolist() == tables.entered.tolist() == [2] + [FREE] * 5


def test_releasing_again_or_nothing_changes_nothing() -> None:
    tables = layer_with({10: 2, 11: 3})
    release(tables, torch.tensor([10]))
    before = [table.clone() for table in tables]
    release(tables, torch.tensor([10]))
    release(tables, torch.tensor([], dtype=torch.int64))
    assert all(torch.equal(a, b) for a, b in zip(before, tables, strict=True))
