"""What the cache asks of the machinery under it: claim, copy, evict. One backend a kind of device.

The cache (cache.py) checks calls and keeps the book of requests; a backend owns the two pools and moves
records. `ReferenceBackend` is the executable specification (reference/) in vectorised torch, on any device.
"""

from typing import Protocol

import torch
from torch import Tensor

from hisparse import reference
from hisparse.device_pool import STEP_LIMIT, DevicePool, hit
from hisparse.host_pool import HostPool, rows_of
from hisparse.layout import CacheLayout
from hisparse.order import Policy
from hisparse.reference.rebuild_order import order_is_due


class Backend(Protocol):
    """Moves records between the pools. Every method takes what the cache has checked."""

    host_pool: HostPool
    device_pool: DevicePool
    step_number: int  # of the step that runs, or that ended last

    def begin_step(self, rows: Tensor) -> Tensor:
        """Begin a step and claim a slot in every layer for the records that go to `rows` (int64 [b]).

        Returns int [layers, b] slots.
        """

    def write_through(self, layer: int, records: Tensor, slots: Tensor, rows: Tensor) -> None:
        """Write uint8 [b, record_bytes] records to their slots and host rows."""

    def resolve(self, layer: int, selection: Tensor, request_index: Tensor, page_table: Tensor) -> Tensor:
        """Selection int32 [b, k] to slots int32 [b, k], fetching what is missing; negative: pad."""

    def stage(self, layer: int, records: Tensor, rows: Tensor) -> None:
        """Write uint8 [n, record_bytes] records to host rows, and to slots as far as some are free."""

    def fetch(self, layer: int, rows: Tensor, out: Tensor) -> None:
        """Copy the records of `rows` (int64 [n]) from the host pool to `out`, uint8 [n, record_bytes]."""

    def release(self, rows: Tensor) -> None:
        """Free the slots of `rows` (int64 [n]) in every layer."""


class ReferenceBackend:
    """The operations of reference/ over both pools."""

    def __init__(self, layout: CacheLayout, policy: Policy, device: torch.device) -> None:
        self.policy = policy
        self.host_pool = HostPool(layout, pinned=device.type == "cuda")
        self.device_pool = DevicePool(layout, device)
        self.step_number = 0

    def begin_step(self, rows: Tensor) -> Tensor:
        """See `Backend`."""
        self._tick()
        return torch.stack([self._insert(layer, rows) for layer in range(len(self.device_pool.records))])

    def write_through(self, layer: int, records: Tensor, slots: Tensor, rows: Tensor) -> None:
        """See `Backend`."""
        reference.write_through(records, slots, rows, self.device_pool.records[layer], self.host_pool.records[layer])

    def resolve(self, layer: int, selection: Tensor, request_index: Tensor, page_table: Tensor) -> Tensor:
        """See `Backend`. The order is made again right here if it is due: there is no side stream."""
        tables = self.device_pool.layer(layer)
        rows = rows_of(page_table[request_index], selection)
        host, pool = self.host_pool.records[layer], self.device_pool.records[layer]
        resolved = reference.resolve(tables, rows, self.step_number, self.policy, host, pool)
        self._count(layer, resolved)
        if order_is_due(tables, self.policy):
            reference.rebuild_order(tables, self.step_number, self.policy, listed_at=hit(self.step_number))
            self.device_pool.counters.rebuilds[layer] += 1
        return resolved.slots

    def stage(self, layer: int, records: Tensor, rows: Tensor) -> None:
        """See `Backend`."""
        self._tick()
        host, pool = self.host_pool.records[layer], self.device_pool.records[layer]
        reference.stage(self.device_pool.layer(layer), records, rows, self.step_number, pool, host)

    def fetch(self, layer: int, rows: Tensor, out: Tensor) -> None:
        """See `Backend`."""
        host = self.host_pool.records[layer]
        out.copy_(host.index_select(0, rows.to(host.device)))

    def release(self, rows: Tensor) -> None:
        """See `Backend`."""
        for layer in range(len(self.device_pool.records)):
            reference.release(self.device_pool.layer(layer), rows)

    def _tick(self) -> None:
        """What enters from now on is newer than all that is here."""
        if self.step_number >= STEP_LIMIT:
            self.step_number = self.device_pool.rebase_stamps()
        self.step_number += 1

    def _insert(self, layer: int, rows: Tensor) -> Tensor:
        slots, exhausted = reference.insert(self.device_pool.layer(layer), rows, self.step_number, self.policy)
        self.device_pool.counters.exhausted[layer] += exhausted
        return slots

    def _count(self, layer: int, resolved: reference.Resolved) -> None:
        counters = self.device_pool.counters
        counters.hits[layer] += resolved.hits
        counters.misses[layer] += resolved.misses
        counters.exhausted[layer] += resolved.exhausted
        counters.failed[layer] += resolved.failed
