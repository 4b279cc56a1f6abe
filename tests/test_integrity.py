"""Every table in turn is corrupted, and the check must notice."""

from collections.abc import Callable

import pytest
from torch import Tensor

from hisparse.admission import CacheRequest
from hisparse.cache import HierarchicalCache
from hisparse.device_pool import SlotTables
from hisparse.errors import IntegrityError
from tests.caches import Driver, row_of, small_cache

Corrupt = Callable[[HierarchicalCache, CacheRequest, SlotTables], object]


@pytest.fixture
def driver() -> Driver:
    """A retired, a retracted and an active request; used and free slots, and a list."""
    driver = Driver(small_cache(with_state=True, num_slots=20, max_requests=3))
    retired, active, retracted = driver.admit(staged=6), driver.admit(130, staged=10), driver.admit(staged=2)
    driver.step({active: [9, 1, 2, 3], retracted: [0]})  # the pool is full
    driver.cache.retract(retracted)
    driver.cache.retire(retired)
    driver.step({active: [9, 4, 5, 6]})
    driver.cache.check_integrity()
    return driver


def swap_two_rows(cache: HierarchicalCache, request: CacheRequest, tables: SlotTables) -> None:
    first, second = (int(slot) for slot in (tables.row_of_slot >= 0).nonzero()[:2])
    rows = tables.row_of_slot[[second, first]]
    tables.row_of_slot[[first, second]] = rows
    tables.slot_of_row[rows.long()] = rows.new_tensor([first, second])


def hold_a_dead_row(cache: HierarchicalCache, request: CacheRequest, tables: SlotTables) -> None:
    slot = int((tables.row_of_slot >= 0).nonzero()[0])
    dead = row_of(request, request.length)
    tables.slot_of_row[tables.row_of_slot[slot].long()] = -1
    tables.row_of_slot[slot], tables.slot_of_row[dead] = dead, slot


def repeat_a_free_slot(cache: HierarchicalCache, request: CacheRequest, tables: SlotTables) -> None:
    tables.free[0] = tables.free[1]


def repeat_in_the_order(cache: HierarchicalCache, request: CacheRequest, tables: SlotTables) -> None:
    tables.listed.fill_(3)
    tables.cursor.fill_(0)
    tables.order[0] = tables.order[1]


CORRUPTIONS: dict[str, tuple[Corrupt, str]] = {
    "slot_of_row lost": (lambda c, r, t: t.slot_of_row.fill_(-1), "does not point back"),
    "slot_of_row extra": (
        lambda c, r, t: t.slot_of_row[row_of(r, 100)].fill_(0),
        "a row points at a slot that does not hold it",
    ),
    "row_of_slot": (lambda c, r, t: t.row_of_slot.copy_(t.row_of_slot.roll(1)), "does not point back"),
    "two slots' rows swapped": (swap_two_rows, "bytes are not its host row's"),
    "a row that nobody has": (hold_a_dead_row, "a row that no live request has"),
    "stamp of a used slot": (lambda c, r, t: t.stamp.fill_(-1), "stamped free and in use"),
    "stamp of a free slot": (lambda c, r, t: t.stamp.fill_(1), "stamped free and in use"),
    "num_free": (lambda c, r, t: t.num_free.sub_(1), "the free list is not the free slots"),
    "free": (repeat_a_free_slot, "the free list is not the free slots"),
    "order": (repeat_in_the_order, "stands in the order twice"),
    "cursor": (lambda c, r, t: t.cursor.fill_(99), "the cursor is outside the order"),
    "cursor below 0": (lambda c, r, t: t.cursor.fill_(-1), "the cursor is outside the order"),
    "a slot's bytes": (lambda c, r, t: c.device_pool.records.fill_(0), "bytes are not its host row's"),
    "host bytes": (lambda c, r, t: c.host_pool.records.fill_(0), "bytes are not its host row's"),
    "page table": (lambda c, r, t: c.admission.page_table[r.index, 1].fill_(7), "is not its request's pages"),
    "request's pages": (lambda c, r, t: r.pages.pop(), "reference count"),
    "request's state pages": (lambda c, r, t: r.state_pages.pop(), "reference count"),
    "a page held by nobody": (lambda c, r, t: c.host_pool.pages.hold([7]), "reference count"),
    "a free page lost": (lambda c, r, t: c.host_pool.pages._free.pop(), "the free pages are not"),
    "line of a request is free": (
        lambda c, r, t: c.admission.free_index.append(r.index),
        "the lines of the page table are not one a request",
    ),
    "request forgotten": (lambda c, r, t: c.requests.remove(r), "reference count"),
    "entered": (lambda c, r, t: t.entered.fill_(-1), "no time of entry"),
    "entered after use": (lambda c, r, t: t.entered.add_(99).masked_fill_(t.stamp < 0, -1), "used before its record"),
    "listed above N": (lambda c, r, t: t.listed.fill_(99), "the order too long"),
    "order names no slot": (
        lambda c, r, t: (t.listed.fill_(1), t.cursor.fill_(0), t.order[0].fill_(99)),
        "a slot that does not exist",
    ),
    "page table of selection state": (lambda c, r, t: _state_table(c).fill_(3), "is not its request's state_pages"),
    "page table line of nobody": (
        lambda c, r, t: c.admission.page_table[c.admission.free_index[0]].fill_(3),
        "is not its request's pages",
    ),
    "line lost": (lambda c, r, t: c.admission.free_index.pop(), "the lines of the page table are not one a request"),
    "length": (lambda c, r, t: setattr(r, "length", r.length + 1), "length is not what all its layers have"),
}


def _state_table(cache: HierarchicalCache) -> Tensor:
    assert cache.selection_state is not None
    return cache.selection_state.page_table


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_corruption_is_noticed(name: str, layer: int, driver: Driver) -> None:
    cache = driver.cache
    corrupt, message = CORRUPTIONS[name]
    corrupt(cache, cache.requests[0], cache.device_pool.layer(layer))
    with pytest.raises(IntegrityError, match=message):
        cache.check_integrity()


def test_the_layer_is_named(driver: Driver) -> None:
    driver.cache.device_pool.layer(1).stamp.fill_(-1)
    with pytest.raises(IntegrityError, match="layer 1: "):
        driver.cache.check_integrity()


def test_it_is_refused_inside_a_step(driver: Driver) -> None:
    with driver.cache.step([driver.cache.requests[0]]) as step:
        driver.append(step)
        with pytest.raises(ValueError, match="check_integrity cannot be called inside a step"):
            driver.cache.check_integrity()
