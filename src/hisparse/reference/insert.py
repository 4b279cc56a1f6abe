"""Slots for the records that this step will produce, in one index group; their data comes with write_through."""

from torch import Tensor

from hisparse.device_pool import SlotTables
from hisparse.order import Policy
from hisparse.reference.claim import Claim, claim


def insert(tables: SlotTables, rows: Tensor, step: int, policy: Policy) -> Claim:
    """Claim a slot for each new row, as for a fetched one, stamped as used in this step.

    Args:
        tables: of one index group.
        rows: int64 [b], distinct, in no slot.
        step: the step that produces the records.
        policy: who leaves if no slot is free.
    """
    return claim(tables, rows, step, policy)
