"""How warm every row is: what the two-rate rule (order.py) knows of records, in the device pool or not.

It is brought up to date when a layer was resolved, from the stamps alone (`mark_ranked` leaves there what a selector
ranks next), and slots are ranked by it: here by the reference backend, on a GPU as part of making the order
(cuda/rebuild_order.cu). Rows keep their averages while they are nowhere; the next owner of their host pages starts from
nothing.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from hisparse.device_pool import FREE, SlotTables, fetched, hit
from hisparse.host_pool import rows_of
from hisparse.order import HOT, SLOW_MASK, WARM, HeatedSlots, Policy, Slots, entry_heat, two_rate_keys, warm


class _Heated(NamedTuple):
    """Slots with their heat."""

    row_of_slot: Tensor
    stamp: Tensor
    entered: Tensor
    heat: Tensor


def mark_ranked(tables: SlotTables, positions: Tensor, pages: Tensor, step: Tensor | int) -> None:
    """What the step ranks high and does not select is stamped as fetched in it, so that the heat sees it.

    Args:
        tables: of an index group that was resolved in this step.
        positions: int32 [b, n], the best, selected ones too; -1 pads.
        pages: [b, p] of each request.
        step: a number, or an int32 [] tensor.

    Raises:
        ValueError: positions of another shape or dtype.
    """
    if positions.dtype != torch.int32 or positions.dim() != 2 or len(positions) != len(pages):
        raise ValueError(
            f"best must give positions int32 [{len(pages)}, n], got {positions.dtype} {list(positions.shape)}"
        )
    rows = rows_of(pages, positions)
    slots = tables.slot_of_row[rows.clamp(min=0)].long().masked_fill(rows < 0, -1).flatten()
    is_here = slots >= 0
    anywhere = torch.arange(len(slots), device=slots.device) % len(tables.stamp)  # one place for all would be a queue
    stamps = torch.where(is_here, fetched(step), FREE).int()
    tables.stamp.scatter_reduce_(0, torch.where(is_here, slots, anywhere), stamps, "amax")


class RowHeat:
    """The heat of all rows of every index group.

    Args:
        num_groups, num_rows: of the cache.
        device: where the tables are.
    """

    def __init__(self, num_groups: int, num_rows: int, device: torch.device) -> None:
        self._heat = torch.zeros(num_groups, num_rows, dtype=torch.int32, device=device)
        self._step = torch.zeros(num_groups, num_rows, dtype=torch.int32, device=device)  # the heat is as of its end

    def policy(self, policy: Policy, group: int) -> Policy:
        """The policy with an order function that reads this group's heat."""

        def keys(tables: Slots, step: int) -> Tensor:
            return two_rate_keys(self._heated(tables, group), step)

        return replace(policy, keys=keys)

    def end_step(self, group: int, tables: SlotTables, step: int) -> None:
        """The group was resolved: its residents are a step older, and warmer if the step selected them."""
        used = tables.row_of_slot >= 0
        rows = tables.row_of_slot[used].long()
        heat = self._heat[group, rows]
        away = (step - self._step[group, rows]).clamp(min=0)  # below 0 after the stamps were renumbered
        stamp = tables.stamp[used]
        worth = torch.where(stamp == hit(step), HOT, torch.where(stamp == fetched(step), WARM, 0)).int()
        came = tables.entered[used] == fetched(step)
        self._heat[group, rows] = torch.where(came, entry_heat(heat & SLOW_MASK, away), warm(heat, worth))
        self._step[group, rows] = step

    def forget(self, rows: Tensor) -> None:
        """Nothing is known of these rows (int64 [n], -1: none) any more."""
        self._heat[:, rows[rows >= 0]] = 0

    def _heated(self, tables: Slots, group: int) -> HeatedSlots:
        heat = self._heat[group][tables.row_of_slot.clamp(min=0)]
        return _Heated(tables.row_of_slot, tables.stamp, tables.entered, heat)
