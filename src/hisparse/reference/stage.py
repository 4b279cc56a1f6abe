"""Prefill records go to the host pool, and to the device pool as far as slots are free."""

from torch import Tensor

from hisparse.device_pool import SlotTables, fetched
from hisparse.reference.claim import enter, pop_free


def stage(
    tables: SlotTables,  # of one index group
    records: Tensor,  # [n, record_bytes] uint8
    rows: Tensor,  # [n] int64, in no slot
    step: int,  # after every step that has begun
    pool: Tensor,  # [N, record_bytes] uint8, one layer's slots
    host: Tensor,  # [rows, record_bytes] uint8, one layer's part of the host pool
) -> None:
    """Write every record to the host; the first ones also take what slots are free, and evict nobody.

    They are stamped as fetched between two steps: newer than all that is here, older than the next step.
    """
    host.index_copy_(0, rows.to(host.device), records.to(host.device))
    slots = pop_free(tables, rows.numel())
    enter(tables, slots, rows[: slots.numel()], fetched(step))
    pool.index_copy_(0, slots, records[: slots.numel()].to(pool.device))
