"""The device pool: for each layer N slots of records in device memory, and the tables that say who is where.

Fed by resolve and insert, which claim slots; read by attention, by slot. The layers of an index group hold the same
positions at the same slots, so tables are a group's. Who is evicted next stands in `order`, a list of slots made off
the critical path by an order function (order.py).

Stamps count half steps: a record fetched in step s is stamped 2s and one hit in step s 2s + 1, so that a
fetched record leaves before one that was hit in the same step. -1 marks a free slot.
"""

import math
from typing import NamedTuple, overload

import torch
from torch import Tensor

from hisparse.errors import DeviceMemoryError
from hisparse.layout import CacheLayout

FREE = -1
STEP_LIMIT = 2**30 - 2  # the last step whose stamps, 2 * step + 1, fit int32


@overload
def fetched(step: int) -> int: ...
@overload
def fetched(step: Tensor) -> Tensor: ...
def fetched(step: Tensor | int) -> Tensor | int:
    """The stamp of a record that entered in `step`."""
    return 2 * step


def hit(step: int) -> int:
    """The stamp of a resident record that was selected in `step`."""
    return 2 * step + 1


class SlotTables(NamedTuple):
    """The tables of one index group (or, with one more leading dimension, of all)."""

    slot_of_row: Tensor  # int32 [rows]: where a row is in the device pool, -1: nowhere
    row_of_slot: Tensor  # int32 [N]: which row is in a slot, -1: free
    stamp: Tensor  # int32 [N]: last use, in half steps; -1: free
    entered: Tensor  # int32 [N]: when the slot's record came, in half steps
    order: Tensor  # int32 [N]: slots, best victim first, as of when the list was made
    free: Tensor  # int32 [N]: a stack of free slots
    num_free: Tensor  # int32 []: its height
    cursor: Tensor  # int32 []: entries of `order` already passed
    listed: Tensor  # int32 []: entries of `order` that are valid
    listed_at: Tensor  # int32 []: a slot with a later stamp was used since the list was made


class Counters(NamedTuple):
    """What happened, by index group, since the start. Never reset, so that nobody loses a count."""

    hits: Tensor  # int64 [groups]: selected positions found in the device pool
    misses: Tensor  # int64 [groups]: records fetched in each layer
    rebuilds: Tensor  # int64 [groups]: orders made
    exhausted: Tensor  # int64 [groups]: orders that ran out in the middle of a step and were made again at once
    failed: Tensor  # int64 [groups]: records that found no slot; always 0 unless a caller broke the rules


class DevicePool:
    """Slots and tables of all layers on one device.

    Raises:
        DeviceMemoryError: it does not have so much memory.
    """

    def __init__(self, layout: CacheLayout, device: torch.device) -> None:
        groups, slots = len(layout.groups), layout.num_slots
        self.records = _allocate((layout.num_layers, slots, layout.record_bytes), device)

        def full(value: int, *shape: int) -> Tensor:
            return torch.full((groups, *shape), value, dtype=torch.int32, device=device)

        self.tables = SlotTables(
            slot_of_row=full(-1, layout.num_rows),
            row_of_slot=full(-1, slots),
            stamp=full(FREE, slots),
            entered=full(FREE, slots),
            order=full(0, slots),
            free=torch.arange(slots - 1, -1, -1, dtype=torch.int32, device=device).repeat(groups, 1),
            num_free=full(slots),
            cursor=full(0),
            listed=full(0),
            listed_at=full(FREE),
        )
        self.all_counters = torch.zeros(len(Counters._fields), groups, dtype=torch.int64, device=device)
        self.counters = Counters(*self.all_counters)  # views
        self.groups = [SlotTables(*(table[group] for table in self.tables)) for group in range(groups)]
        self._group_of = layout.group_of

    def layer(self, layer: int) -> SlotTables:
        """Views of a layer's tables: those of its index group."""
        return self.groups[self._group_of[layer]]

    def rebase_stamps(self) -> int:
        """Replace every time by its rank among its group's times: the same order, small numbers again.

        Returns the step from which counting goes on, so that every stamp is of an earlier step.
        """
        for group in self.groups:
            times = torch.stack((group.stamp, group.entered))
            stamp, entered = times.unique(return_inverse=True)[1].int()
            group.stamp.copy_(stamp)
            group.entered.copy_(entered)
            free = group.row_of_slot < 0
            group.stamp[free] = FREE
            group.entered[free] = FREE
            group.listed.zero_()  # the list's own stamp is gone: have it made again
            group.cursor.zero_()
            group.listed_at.fill_(FREE)
        return int(self.tables.stamp.shape[1])


def _allocate(shape: tuple[int, int, int], device: torch.device) -> Tensor:
    """uint8 [layers, slots, record_bytes], not set to anything."""
    try:
        return torch.empty(shape, dtype=torch.uint8, device=device)
    except RuntimeError as error:  # torch's own class for a GPU is one of these
        raise DeviceMemoryError(
            f"{shape[1]:,} slots in each of {shape[0]} layers take {math.prod(shape) / 1e9:,.1f} GB on {device}, "
            f"which is not there: lower top_k, device_buffer_size or max_running_requests"
        ) from error
