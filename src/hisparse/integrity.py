"""Proof that the cache's tables agree: docs/architecture.md, what always holds, 1, 2 and 7. Every test ends with it."""

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
    for layer in range(cache.layout.num_layers):
        tables = cache.device_pool.layer(layer)
        if cache.layout.anchors[layer] == layer:
            _check_tables(layer, tables)
            _check_owned(layer, tables, _live_rows(cache, layer))
            _check_records(layer, tables, cache.records(layer), cache.host_pool.records[layer])
        else:
            complete = _live_rows(cache, layer)
            _check_records(layer, tables, cache.records(layer), cache.host_pool.records[layer], complete)
    _check_page_tables(cache)
    _check_requests(cache)


def _require(condition: bool | Tensor, layer: int, what: str) -> None:
    if not condition:
        raise IntegrityError(f"layer {layer}: {what}")


def _live_rows(cache: "HierarchicalCache", layer: int) -> Tensor:
    """bool [rows]: rows of positions that some request has in that layer."""
    live = torch.zeros(cache.layout.num_rows, dtype=torch.bool, device=cache.device)
    for request in cache.requests:
        pages = torch.tensor(request.pages, device=cache.device)
        rows = (pages[:, None] * PAGE_RECORDS + torch.arange(PAGE_RECORDS, device=cache.device)).flatten()
        live[rows[: request.staged[layer]]] = True
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
    _require(((tables.entered == FREE) == ~used).all(), layer, "a slot has no time of entry, or a free one has")
    _require((tables.entered <= tables.stamp).all(), layer, "a slot was used before its record entered")
    _check_order(layer, tables)


def _check_order(layer: int, tables: SlotTables) -> None:
    cursor, num_listed, num_slots = int(tables.cursor), int(tables.listed), tables.order.shape[0]
    _require(0 <= cursor <= num_listed <= num_slots, layer, "the cursor is outside the order, or the order too long")
    listed = tables.order[:num_listed].long()
    _require(((listed >= 0) & (listed < num_slots)).all(), layer, "the order names a slot that does not exist")
    _require(listed.unique().numel() == listed.numel(), layer, "a slot stands in the order twice")


def _check_owned(layer: int, tables: SlotTables, live: Tensor) -> None:
    rows = tables.row_of_slot[tables.row_of_slot >= 0].long()
    _require(live[rows].all(), layer, "a slot holds a row that no live request has")


def _check_records(layer: int, tables: SlotTables, pool: Tensor, host: Tensor, complete: Tensor | None = None) -> None:
    slots = (tables.row_of_slot >= 0).nonzero().flatten()
    if complete is not None:  # rows that the layer has; its anchor may be ahead
        slots = slots[complete[tables.row_of_slot[slots].long()]]
    rows = tables.row_of_slot[slots].long().to(host.device)
    _require(torch.equal(pool[slots].to(host.device), host[rows]), layer, "a slot's bytes are not its host row's")


def _check_page_tables(cache: "HierarchicalCache") -> None:
    lines = {request.index: request for request in cache.requests if request.index >= 0}
    taken = [request.index for request in cache.requests if request.index >= 0]
    if sorted([*taken, *cache.admission.free_index]) != list(range(cache.layout.max_requests)):
        raise IntegrityError("the lines of the page table are not one a request on the device, the others free")
    tables = [(cache.admission.page_table, "pages")]
    if cache.selection_state is not None:
        tables.append((cache.selection_state.page_table, "state_pages"))
    for table, name in tables:
        for index, line in enumerate(table.tolist()):
            pages = getattr(lines[index], name) if index in lines else []
            if line != pages + [-1] * (len(line) - len(pages)):
                raise IntegrityError(f"line {index} of a page table is not its request's {name}")


def _check_requests(cache: "HierarchicalCache") -> None:
    for request in cache.requests:
        if not request.length == min(request.staged) <= max(request.staged) <= request.capacity:
            raise IntegrityError("a request's length is not what all its layers have, or exceeds its capacity")
        if any(request.staged[layer] > request.staged[anchor] for layer, anchor in enumerate(cache.layout.anchors)):
            raise IntegrityError("a shared layer of a request has positions that its anchor has not")
