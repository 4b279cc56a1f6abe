"""Policies as order functions: given a layer's tables, which slot leaves first.

An order function runs off the critical path and gives every slot a key; slots leave in ascending order of
key. The cache sorts by it (reference/rebuild_order.py), and the simulator uses the same function. A policy
that ranks by recency needs a new list only when the old one is half used up: a slot touched since then is
passed over when it comes up, and every untouched slot is older than every touched one. Any other policy
is ranked again at every step.

The two-rate rule keeps a `heat` for every row: two averages of how often the record is selected, a fast one of 12 bits
and a slow one of 18, together in an int32. A record's slow average is remembered when it leaves, and taken up again
when it comes back.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

HOT = 4095  # what a selected slot is worth to its averages
WARM = 1023  # and one whose record is among the ranks k + 1 to 2k, where the selector tells
RANKED = 2  # times k: ranks that count
FAST, SLOW = 2, 6  # an average moves by 1/4 or 1/64 of its distance a step
FAST_WEIGHT = 2  # of the fast average; pages of Quest, which move as one, need it
FINER = 6  # more bits of the slow average, which moves by less
SLOW_BITS = 12 + FINER
SLOW_MASK = (1 << SLOW_BITS) - 1


class Slots(Protocol):
    """What an order function reads of a layer's slots: the cache's tables, or the simulator's, of several layers."""

    @property
    def row_of_slot(self) -> Tensor:
        """int32 [..., N], which row is in a slot, -1: free."""

    @property
    def stamp(self) -> Tensor:
        """int32 [..., N], last use, in half steps."""

    @property
    def entered(self) -> Tensor:
        """int32 [..., N], when the slot's record came, in half steps."""


class HeatedSlots(Slots, Protocol):
    """What the two-rate rule reads beside that."""

    @property
    def heat(self) -> Tensor:
        """int32 [..., N], see `warm`."""


@dataclass(frozen=True)
class Policy:
    """An order function and what the cache must know to use it.

    `keys(tables, step)` gives int64 [..., N], the lowest leaves first; keys of free slots are not looked at.
    `by_recency` says that a list stays exact while slots touched since it was made are passed over; `heated` that the
    backend keeps the slots' heat for it (heat.py); `ranked` that the heat is also of what the selector ranks next.
    """

    name: str
    keys: Callable[[Slots, int], Tensor]
    by_recency: bool = False
    heated: bool = False
    ranked: bool = False


def _then_row(first: Tensor, tables: Slots) -> Tensor:
    """Order by `first`, an int32 of at least -1, and among equals by row, the lower one first."""
    return (first.long() << 32) | tables.row_of_slot.long().clamp(min=0)


def _lru(tables: Slots, step: int) -> Tensor:
    return _then_row(tables.stamp, tables)


def _fifo(tables: Slots, step: int) -> Tensor:
    return _then_row(tables.entered, tables)


def _random(tables: Slots, step: int) -> Tensor:
    """A multiplicative hash of slot and step: different at every step, the same on every machine."""
    slots = torch.arange(tables.stamp.shape[-1], device=tables.stamp.device)
    mixed = (slots + 0x9E3779B9 * (step + 1)) & 0xFFFFFFFF
    for shift in (16, 13, 16):
        mixed = ((mixed ^ (mixed >> shift)) * 0x45D9F3B) & 0xFFFFFFFF
    return mixed


def warm(heat: Tensor, worth: Tensor | int) -> Tensor:
    """Both averages one step on.

    Args:
        heat: int32, the fast average above the `SLOW_BITS` of the slow one.
        worth: int32 of the same shape, 0 to `HOT`: what the step thought of each slot.
    """
    fast, slow = heat >> SLOW_BITS, heat & SLOW_MASK
    return ((fast + ((worth - fast) >> FAST)) << SLOW_BITS) | (slow + (((worth << FINER) - slow) >> SLOW))


def entry_heat(slow: Tensor, steps_away: Tensor) -> Tensor:
    """The heat of records that enter because they are selected.

    Args:
        slow: int32, the slow average that each left with; 0 for one that was never here.
        steps_away: int32, the steps since.
    """
    faded = (slow * (1 - 2.0**-SLOW) ** steps_away).int()
    return warm(faded, HOT)


def two_rate_keys(tables: HeatedSlots, step: int) -> Tensor:
    """Rank by what the averages add up to, the fast one twice, in the next step if that does not select the slot.

    So a list that is made when a step is over is exact in the next one: the slots that it uses are passed over, and
    the others cool as foreseen.
    """
    cooler = warm(tables.heat, 0)
    return _then_row((cooler >> SLOW_BITS << FINER) * FAST_WEIGHT + (cooler & SLOW_MASK), tables)


def _without_heat(tables: Slots, step: int) -> Tensor:
    raise ValueError("the two-rate rule ranks by heat, which a backend keeps: see hisparse.heat")


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("lru", _lru, by_recency=True),
        Policy("fifo", _fifo),
        Policy("random", _random),
        Policy("two_rate", _without_heat, heated=True),
        Policy("two_rate_tier", _without_heat, heated=True, ranked=True),
    )
}
