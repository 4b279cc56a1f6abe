"""Make an index group's list of victims anew. Off the critical path: resolve only walks the list."""

import torch

from hisparse.device_pool import SlotTables
from hisparse.order import Policy

_LAST = torch.iinfo(torch.int64).max


def rebuild_order(tables: SlotTables, step: int, policy: Policy, listed_at: int) -> None:
    """Sort the slots in use by the policy's key and start the list from its beginning.

    Args:
        tables: of one index group.
        step: the current step, for policies that depend on it.
        policy: whose order function to use.
        listed_at: slots stamped later than this count as used since the list was made.
    """
    free = tables.row_of_slot < 0
    keys = policy.keys(tables, step).masked_fill(free, _LAST)
    tables.order.copy_(torch.argsort(keys, stable=True))
    tables.listed.copy_(free.numel() - free.sum())
    tables.cursor.zero_()
    tables.listed_at.fill_(listed_at)


def order_is_due(tables: SlotTables, policy: Policy) -> bool:
    """Whether the list must be made again before the next step's claims.

    A recency list stays exact, so it is made again only when free slots and entries left on the list are
    together fewer than half the pool.
    """
    left = tables.num_free + tables.listed - tables.cursor
    return not policy.by_recency or int(left) * 2 < tables.order.shape[0]
