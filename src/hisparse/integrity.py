"""Proof that the cache's tables agree: DESIGN.md section 3, invariants 1, 2 and 7. Every test ends with it."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hisparse.device_pool import FREE, SlotTables
from hisparse.errors import IntegrityError
from hisparse.layout import PAGE_RECORDS

if TYPE_CHECKING:
    from hisparse.cache import HierarchicalCache


def check_cache(cache: "HierarchicalCache") -> None:
    """Raise `IntegrityError`, naming the first contradiction found."""
    cache.host_pool.pages.check([request.pages for request in cache.requests])
    if cache.selection_state is not None:
        cache.selection_state.pages.check([request.state_pages for request in cache.requests])
    live = _live_rows(cache)
    for layer in range(cache.layout.num_layers):
        tables = cache.device_pool.layer(layer)
        _check_tables(layer, tables)
        _check_owned(layer, tables, live)
        _check_records(layer, tables, cache.records(layer), cache.host_pool.records[layer])
    _check_page_table(cache)


def _require(condition: bool | Tensor, layer: int, what: str) -> None:
    if not condition:
        raise IntegrityError(f"layer {layer}: {what}")


def _live_rows(cache: "HierarchicalCache") -> Tensor:
    """bool [rows]: rows of positions that some request has."""
    live = torch.zeros(cache.layout.num_rows, dtype=torch.bool, device=cache.device)
    for request in cache.requests:
        pages = torch.tensor(request.pages, device=cache.device)
        rows = (pages[:, None] * PAGE_RECORDS + torch.arange(PAGE_RECORDS, device=cache.device)).flatten()
        live[rows[: max(request.staged)]] = True
    return live


def _check_tables(layer: int, tables: SlotTables) -> None:
    used = tables.row_of_slot >= 0
    slots = used.nonzero().flatten()
    rows = tables.row_of_slot[slots].long()
    _require((tables.slot_of_row[rows] == slots).all(), layer, "a slot's row does not point back at the slot")
    resident = int((tables.slot_of_row >= 0).sum())
    _require(resident == slots.numel(), layer, "a row points at a slot that does not hold it")
    _require(((tables.stamp == FREE) == ~used).all(), layer, "a slot is stamped free and in use, or neither")
    height = int(tables.num_free)
    free = tables.free[:height].long().sort().values
    _require(
        torch.equal(free, (~used).nonzero().flatten()),
        layer,
        "the free list is not the free slots, once each",
    )
    listed = tables.order[: int(tables.listed)]
    _require(listed.unique().numel() == listed.numel(), layer, "a slot stands in the order twice")
    _require(0 <= int(tables.cursor) <= int(tables.listed), layer, "the cursor is outside the order")


def _check_owned(layer: int, tables: SlotTables, live: Tensor) -> None:
    rows = tables.row_of_slot[tables.row_of_slot >= 0].long()
    _require(live[rows].all(), layer, "a slot holds a row that no live request has")


def _check_records(layer: int, tables: SlotTables, pool: Tensor, host: Tensor) -> None:
    slots = (tables.row_of_slot >= 0).nonzero().flatten()
    rows = tables.row_of_slot[slots].long().to(host.device)
    _require(torch.equal(pool[slots].to(host.device), host[rows]), layer, "a slot's bytes are not its host row's")


def _check_page_table(cache: "HierarchicalCache") -> None:
    active = [request for request in cache.requests if request.index >= 0]
    for request in active:
        line = cache.page_table[request.index].tolist()
        expected = request.pages + [-1] * (len(line) - len(request.pages))
        if line != expected:
            raise IntegrityError("a request's line in the page table is not its pages")
    indices = [request.index for request in active]
    if len(set(indices)) != len(indices) or not set(indices).isdisjoint(cache._free_index):
        raise IntegrityError("two requests share a line of the page table")
