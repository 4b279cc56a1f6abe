"""Policies as order functions: given a layer's tables, which slot leaves first.

An order function runs off the critical path and gives every slot a key; slots leave in ascending order of
key. The cache sorts by it (reference/rebuild_order.py), and the simulator uses the same function. A policy
that ranks by recency needs a new list only when the old one is half used up: a slot touched since then is
passed over when it comes up, and every untouched slot is older than every touched one. Any other policy
is ranked again at every step.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hisparse.device_pool import SlotTables


@dataclass(frozen=True)
class Policy:
    """An order function and what the cache must know to use it.

    `keys(tables, step)` gives int64 [N], the lowest leaves first; keys of free slots are not looked at.
    `by_recency` says that a list stays exact while slots touched since it was made are passed over.
    """

    name: str
    keys: Callable[[SlotTables, int], Tensor]
    by_recency: bool = False


def _then_row(first: Tensor, tables: SlotTables) -> Tensor:
    """Order by `first`, an int32 of at least -1, and among equals by row, the lower one first."""
    return (first.long() << 32) | tables.row_of_slot.long().clamp(min=0)


def _lru(tables: SlotTables, step: int) -> Tensor:
    return _then_row(tables.stamp, tables)


def _fifo(tables: SlotTables, step: int) -> Tensor:
    return _then_row(tables.entered, tables)


def _random(tables: SlotTables, step: int) -> Tensor:
    """A multiplicative hash of slot and step: different at every step, the same on every machine."""
    slots = torch.arange(tables.stamp.shape[-1], device=tables.stamp.device)
    mixed = (slots + 0x9E3779B9 * (step + 1)) & 0xFFFFFFFF
    for shift in (16, 13, 16):
        mixed = ((mixed ^ (mixed >> shift)) * 0x45D9F3B) & 0xFFFFFFFF
    return mixed


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("lru", _lru, by_recency=True),
        Policy("fifo", _fifo),
        Policy("random", _random),
    )
}
