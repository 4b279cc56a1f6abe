"""Give back the slots of rows whose request leaves the device."""

from torch import Tensor

from hisparse.device_pool import FREE, SlotTables


def release(tables: SlotTables, rows: Tensor) -> None:
    """Clear the rows' entries in one index group and put their slots on the free list.

    Args:
        tables: of one index group.
        rows: int64 [n], distinct, -1: none; rows that are in no slot are passed over.
    """
    rows = rows[rows >= 0]
    slots = tables.slot_of_row[rows]
    slots = slots[slots >= 0].long()
    tables.slot_of_row[rows] = -1
    tables.row_of_slot[slots] = -1
    tables.stamp[slots] = FREE
    tables.entered[slots] = FREE
    height = int(tables.num_free)
    tables.free[height : height + slots.numel()] = slots.int()
    tables.num_free.fill_(height + slots.numel())
