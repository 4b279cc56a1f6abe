"""What the cache asks of the machinery under it: claim, copy, evict. One backend a kind of device.

The cache (cache.py) checks calls and keeps the book of requests; a backend owns the two pools and moves
records. `ReferenceBackend` is the executable specification (reference/) in vectorised torch, on any device; the
kernels' is `hisparse.kernels.backend.KernelBackend`.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hisparse import reference
from hisparse.device_pool import STEP_LIMIT, Counters, DevicePool, hit
from hisparse.heat import RowHeat, mark_ranked
from hisparse.host_memory import Progress
from hisparse.host_pool import HostPool, rows_of
from hisparse.layout import CacheLayout
from hisparse.order import RANKED, Policy
from hisparse.ranking import Best
from hisparse.reference.rebuild_order import order_is_due


class BackendOptions(NamedTuple):
    """What a backend is made with, beside the sizes."""

    policy: Policy
    prefetch: bool = True  # a shared layer's misses are fetched as soon as the anchor's are known
    io: bool = True  # False: the no-IO oracle, which moves no record and whose slots hold anything
    progress: Progress | None = None  # of pinning the host pool
    host_pool: HostPool | None = None  # an empty one to use instead of a new one


class Outcome(NamedTuple):
    """What the device says after a step, counted since the start."""

    step_number: int  # of the step that it ended last
    inserted: int  # new records that `insert` was given, in 32 bits
    failed: int  # records that found no slot


class Backend(Protocol):
    """Moves records between the pools. Every method takes what the cache has checked."""

    host_pool: HostPool
    device_pool: DevicePool
    step_number: int  # of the step that runs, or that ended last
    can_record: bool  # steps can be recorded in a CUDA graph

    def make_room_for_step(self) -> None:
        """Renumber the stamps if the next step's would not fit."""

    def note_step(self, number: int) -> None:
        """The device is in this step: a recorded one was replayed, or one was undone."""

    def insert(self, rows: Tensor) -> Tensor:
        """Begin a step and claim a slot in every index group for the records that go to `rows`, int64 [b], -1: padded.

        Returns int [groups, b] slots, -1: padded.
        """

    def write_through(self, layer: int, records: Tensor, slots: Tensor, rows: Tensor) -> None:
        """Write uint8 [b, record_bytes] records to slots and host rows, at the latest when the layer is resolved."""

    def resolve(
        self,
        layer: int,
        selection: Tensor,
        request_index: Tensor,
        lengths: Tensor,
        page_table: Tensor,
        best: Best | None = None,
    ) -> Tensor:
        """Selection int32 [b, k] to slots int32 [b, k], fetching what is missing; `layer` is an anchor.

        A position that is negative or at least the line's length (int64 [b]) is a pad, and gets -1. A policy that wants
        ranks asks `best` for them.
        """

    def follow(self, layer: int) -> None:
        """A shared layer has its records at the slots that its anchor's resolve handed out last."""

    def end_step(self) -> None:
        """Finish what runs beside the step, such as the copies to the host."""

    def forget_step(self) -> None:
        """A recording failed: nothing of it will ever run."""

    def outcome(self) -> Outcome:
        """Wait for the step and say how it went."""

    def read_counters(self) -> Counters:
        """The counters on the CPU, as they are now, without waiting for a step that runs."""

    def read_free_slots(self) -> int:
        """Free slots of all index groups, likewise."""

    def stage(self, layer: int, records: Tensor, rows: Tensor) -> None:
        """Write uint8 [n, record_bytes] records to host rows, and to slots as far as some are free.

        A shared layer's go to the slots that its anchor's took.
        """

    def fetch(self, layer: int, rows: Tensor, out: Tensor) -> None:
        """Copy the records of `rows` (int64 [n]) from the host pool to `out`, uint8 [n, record_bytes]."""

    def release(self, rows: Tensor) -> None:
        """Free the slots of `rows` (int64 [n], -1: none) in every layer."""


class ReferenceBackend:
    """The operations of reference/ over both pools."""

    can_record = False

    def __init__(self, layout: CacheLayout, options: BackendOptions, device: torch.device) -> None:
        self.heat: RowHeat | None = None
        self.policies = [options.policy] * len(layout.groups)
        if options.policy.heated:
            self.heat = heat = RowHeat(len(layout.groups), layout.num_rows, device)
            self.policies = [heat.policy(options.policy, group) for group in range(len(layout.groups))]
        self.host_pool = options.host_pool or HostPool(layout, pinned=device.type == "cuda", progress=options.progress)
        self.device_pool = DevicePool(layout, device)
        self.step_number = 0
        self._layout = layout
        self._io = options.io
        self._inserted = 0

    def make_room_for_step(self) -> None:
        """See `Backend`."""
        if self.step_number >= STEP_LIMIT:
            self.step_number = self.device_pool.rebase_stamps()

    def note_step(self, number: int) -> None:
        """See `Backend`."""
        self.step_number = number

    def insert(self, rows: Tensor) -> Tensor:
        """See `Backend`."""
        self.step_number += 1
        self._inserted += int((rows >= 0).sum())
        slots = torch.full((len(self.device_pool.groups), len(rows)), -1, device=rows.device)
        live = rows >= 0
        for group in range(len(slots)):
            slots[group, live] = self._insert(group, rows[live])
        return slots

    def write_through(self, layer: int, records: Tensor, slots: Tensor, rows: Tensor) -> None:
        """See `Backend`."""
        live = rows >= 0
        pool, host = self.device_pool.records[layer], self.host_pool.records[layer]
        reference.write_through(records[live], slots[live], rows[live], pool, host)

    def resolve(
        self,
        layer: int,
        selection: Tensor,
        request_index: Tensor,
        lengths: Tensor,
        page_table: Tensor,
        best: Best | None = None,
    ) -> Tensor:
        """See `Backend`. The order is made again right here if it is due: there is no side stream."""
        tables = self.device_pool.layer(layer)
        pages = page_table[request_index]  # line -1 of a padded request is any line: it has no positions
        rows = rows_of(pages, selection.masked_fill(selection >= lengths[:, None], -1))
        host, pool = self.host_pool.records[layer], self.device_pool.records[layer]
        group = self._layout.group_of[layer]
        policy = self.policies[group]
        resolved = reference.resolve(tables, rows, self.step_number, policy, host, pool, io=self._io)
        self._count(group, resolved)
        for shared in self._layout.shared_layers(layer) if self._io else ():
            host, pool = self.host_pool.records[shared], self.device_pool.records[shared]
            reference.replay(resolved.miss_rows, resolved.miss_slots, host, pool)
        if policy.ranked and best is not None:
            mark_ranked(tables, best(RANKED * self._layout.top_k).positions, pages, self.step_number)
        if self.heat is not None:
            self.heat.end_step(group, tables, self.step_number)
        if order_is_due(tables, policy):
            reference.rebuild_order(tables, self.step_number, policy, listed_at=hit(self.step_number))
            self.device_pool.counters.rebuilds[group] += 1
        return resolved.slots

    def follow(self, layer: int) -> None:
        """See `Backend`. The anchor's resolve saw to it."""

    def end_step(self) -> None:
        """See `Backend`. Nothing runs beside a step here."""

    def forget_step(self) -> None:
        """See `Backend`. Nothing is recorded here."""

    def outcome(self) -> Outcome:
        """See `Backend`."""
        return Outcome(self.step_number, self._inserted % 2**32, int(self.device_pool.counters.failed.sum()))

    def read_counters(self) -> Counters:
        """See `Backend`."""
        return Counters(*self.device_pool.all_counters.cpu())

    def read_free_slots(self) -> int:
        """See `Backend`."""
        return int(self.device_pool.tables.num_free.sum())

    def stage(self, layer: int, records: Tensor, rows: Tensor) -> None:
        """See `Backend`."""
        tables = self.device_pool.layer(layer)
        host, pool = self.host_pool.records[layer], self.device_pool.records[layer]
        if self._layout.anchors[layer] != layer:
            slots = tables.slot_of_row[rows].long()
            host.index_copy_(0, rows.to(host.device), records.to(host.device))
            pool.index_copy_(0, slots[slots >= 0], records[slots >= 0].to(pool.device))
            return
        self.make_room_for_step()
        self.step_number += 1  # a moment of its own, between two steps
        reference.stage(tables, records, rows, self.step_number, pool, host)

    def fetch(self, layer: int, rows: Tensor, out: Tensor) -> None:
        """See `Backend`."""
        host = self.host_pool.records[layer]
        out.copy_(host.index_select(0, rows.to(host.device)))

    def release(self, rows: Tensor) -> None:
        """See `Backend`."""
        for tables in self.device_pool.groups:
            reference.release(tables, rows)
        if self.heat is not None:
            self.heat.forget(rows)

    def _insert(self, group: int, rows: Tensor) -> Tensor:
        slots, exhausted = reference.insert(
            self.device_pool.groups[group], rows, self.step_number, self.policies[group]
        )
        self.device_pool.counters.exhausted[group] += exhausted
        return slots

    def _count(self, group: int, resolved: reference.Resolved) -> None:
        counters = self.device_pool.counters
        counters.hits[group] += resolved.hits
        counters.misses[group] += resolved.misses
        counters.exhausted[group] += resolved.exhausted
        counters.failed[group] += resolved.failed


def new_backend(layout: CacheLayout, options: BackendOptions, device: torch.device) -> Backend:
    """The kernels on a CUDA device, the reference on any other."""
    if device.type == "cuda":
        from hisparse.kernels.backend import KernelBackend  # needs cuda-bindings

        return KernelBackend(layout, options, device)
    return ReferenceBackend(layout, options, device)
