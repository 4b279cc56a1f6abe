"""Pages, their holders, and the way from positions to rows."""

import pytest
import torch

from hisparse.errors import CapacityError, IntegrityError
from hisparse.host_pool import HostPool, Pages, rows_of
from tests.caches import small_layout


def test_lowest_pages_first_and_each_once() -> None:
    pages = Pages(5)
    assert pages.allocate(2) == [0, 1]
    assert pages.allocate(0) == []
    assert pages.allocate(3) == [2, 3, 4]
    assert pages.num_free == 0
    pages.check([[0, 1], [2, 3, 4]])


def test_too_few_free_pages_takes_none() -> None:
    pages = Pages(3)
    held = pages.allocate(1)
    with pytest.raises(CapacityError, match="3 pages asked for, 2 of 3 are free"):
        pages.allocate(3)
    assert pages.num_free == 2
    pages.check([held])


def test_shared_pages_are_free_when_the_last_holder_lets_go() -> None:
    pages = Pages(4)
    first = pages.allocate(3)
    shared = first[:2]
    pages.hold(shared)
    assert pages.held_once(first) == [2]
    pages.check([first, shared])
    pages.let_go(first)
    assert pages.num_free == 2
    assert pages.held_once(shared) == shared
    pages.let_go(shared)
    pages.check([])
    assert sorted(pages.allocate(4)) == [0, 1, 2, 3]


def test_contradictions_are_found() -> None:
    pages = Pages(3)
    held = pages.allocate(1)
    for holders in ([], [held, held], [[1]]):
        with pytest.raises(IntegrityError, match="reference count"):
            pages.check(holders)
    pages._free.append(2)
    with pytest.raises(IntegrityError, match="free pages"):
        pages.check([held])
    pages._free = [1]
    with pytest.raises(IntegrityError, match="free pages"):
        pages.check([held])


def test_pool_has_a_row_for_every_record_of_every_layer() -> None:
    pool = HostPool(small_layout(), pinned=False)
    assert pool.records.shape == (2, 512, 32)
    assert pool.records.dtype == torch.uint8
    assert pool.pages.num_free == 8


def test_rows_of() -> None:
    pages = torch.tensor([[5, 0, -1], [2, -1, -1]], dtype=torch.int32)
    positions = torch.tensor([[0, 63, 64, 127, -1], [63, -1, 64, 128, 192]], dtype=torch.int32)
    rows = rows_of(pages, positions)
    assert rows.dtype == torch.int64
    assert rows.tolist() == [[320, 383, 0, 63, -1], [191, -1, -1, -1, -1]]


def test_rows_outside_any_page_are_pads() -> None:
    pages = torch.tensor([3, 1], dtype=torch.int32)
    positions = torch.tensor([128, 2**31 - 1, -2, -64, -(2**31)], dtype=torch.int32)
    assert rows_of(pages, positions).tolist() == [-1] * 5


def test_rows_beyond_int32_bytes_do_not_overflow() -> None:
    last = 2**25 - 2  # the last page of the largest pool
    assert rows_of(torch.tensor([last], dtype=torch.int32), torch.tensor([63])).tolist() == [2**31 - 65]


def test_rows_of_nothing() -> None:
    assert rows_of(torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 0, dtype=torch.int32)).shape == (2, 0)
