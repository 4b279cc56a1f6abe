"""Claim slots for records that enter the device pool: free ones first, then victims from the order.

Shared by `insert` and `resolve`. A victim is never a slot that was used in the current step, so what was
handed out stays valid until the next step.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hisparse.device_pool import FREE, SlotTables, fetched
from hisparse.order import Policy
from hisparse.reference.rebuild_order import rebuild_order


class Claim(NamedTuple):
    """Slots for the first rows asked for; fewer than asked only if the pool cannot hold the step."""

    slots: Tensor  # int64 [n]
    exhausted: bool  # the order ran out and was made again on the spot


def claim(tables: SlotTables, rows: Tensor, step: int, policy: Policy) -> Claim:
    """Give each of `rows` (int64 [n], distinct, in no slot) a slot and publish it in the tables."""
    free = pop_free(tables, rows.numel())
    victims, exhausted = _pop_victims(tables, rows.numel() - free.numel(), step, policy)
    evicted = tables.row_of_slot[victims].long()
    tables.slot_of_row[evicted] = -1
    slots = torch.cat([free, victims])
    enter(tables, slots, rows[: slots.numel()], fetched(step))
    return Claim(slots, exhausted)


def enter(tables: SlotTables, slots: Tensor, rows: Tensor, stamp: int) -> None:
    """Publish that `rows` are now in `slots`."""
    tables.row_of_slot[slots] = rows.int()
    tables.slot_of_row[rows] = slots.int()
    tables.stamp[slots] = stamp
    tables.entered[slots] = stamp


def pop_free(tables: SlotTables, count: int) -> Tensor:
    """Up to `count` free slots, int64."""
    height = int(tables.num_free)
    left = max(height - count, 0)
    tables.num_free.fill_(left)
    return tables.free[left:height].long()


def _pop_victims(tables: SlotTables, count: int, step: int, policy: Policy) -> tuple[Tensor, bool]:
    """The next `count` slots of the order that may leave; the list is made again once if it runs out."""
    victims = _walk_order(tables, count, step, policy)
    missing = count - victims.numel()
    if not missing:
        return victims, False
    tables.stamp[victims] = fetched(step)  # taken: the new list must not offer them again
    rebuild_order(tables, step, policy, listed_at=fetched(step) - 1)
    return torch.cat([victims, _walk_order(tables, missing, step, policy)]), True


def _walk_order(tables: SlotTables, count: int, step: int, policy: Policy) -> Tensor:
    """Up to `count` entries from the cursor on, but not free slots, those used too recently, and refilled ones."""
    if not count:
        return tables.order[:0].long()
    listed_at, before_now = int(tables.listed_at), fetched(step) - 1
    limit = min(listed_at, before_now) if policy.by_recency else before_now
    cursor = int(tables.cursor)
    candidates = tables.order[cursor : int(tables.listed)].long()
    stamps = tables.stamp[candidates]
    same_record = tables.entered[candidates] <= listed_at  # the slot did not change hands since
    chosen = ((stamps != FREE) & (stamps <= limit) & same_record).nonzero().flatten()[:count]
    passed = int(chosen[-1]) + 1 if chosen.numel() == count else candidates.numel()
    tables.cursor.fill_(cursor + passed)
    return candidates[chosen]
