"""One layer's tables with records in chosen slots, for tests of single operations."""

from collections.abc import Mapping

import torch

from hisparse.device_pool import DevicePool, SlotTables
from tests.caches import small_layout

NUM_SLOTS = 6
NUM_ROWS = 64


def layer_with(stamps: Mapping[int, int]) -> SlotTables:
    """A layer of 6 slots; the rows of `stamps` are in slots 0, 1, ... in turn, stamped as given."""
    layout = small_layout(num_layers=1, max_requests=1, num_pages=1)
    tables = DevicePool(layout, torch.device("cpu")).layer(0)
    for slot, (row, stamp) in enumerate(stamps.items()):
        tables.slot_of_row[row] = slot
        tables.row_of_slot[slot] = row
        tables.stamp[slot] = tables.entered[slot] = stamp
    num_free = NUM_SLOTS - len(stamps)
    tables.num_free.fill_(num_free)
    tables.free[:num_free] = torch.arange(NUM_SLOTS - 1, len(stamps) - 1, -1)
    return tables


def listed_rows(tables: SlotTables) -> list[int]:
    """Rows in the order in which the list offers their slots."""
    slots = tables.order[int(tables.cursor) : int(tables.listed)].long()
    return [int(row) for row in tables.row_of_slot[slots]]


def rows_in(tables: SlotTables) -> set[int]:
    """Rows that are in the device pool, which both tables must agree on."""
    found = {row for row in range(NUM_ROWS) if tables.slot_of_row[row] >= 0}
    assert found == set(tables.row_of_slot[tables.row_of_slot >= 0].tolist())
    for row in found:
        assert tables.row_of_slot[int(tables.slot_of_row[row])] == row
    return found
