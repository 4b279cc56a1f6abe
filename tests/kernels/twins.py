"""A device pool on the GPU and one on the CPU, driven by the same calls: the kernels and their specification.

Which slots are evicted may differ (ties have no order on the GPU); what a slot holds may not. Every step checks
each slot handed out against the host, and `check` the tables' invariants.
"""

import torch
from torch import Tensor

from hisparse import reference
from hisparse.device_pool import FREE, DevicePool
from hisparse.host_pool import rows_of
from hisparse.integrity import _check_records, _check_tables
from hisparse.kernels import ops
from hisparse.kernels.state import LaunchState, MissPlan, new_launch_state
from hisparse.layout import PAGE_RECORDS, CacheLayout
from hisparse.order import POLICIES
from hisparse.reference.rebuild_order import order_is_due

GARBAGE = 0xFF


class Twins:
    """Layer tables on both devices over one pinned host pool; request r has the pages of line r."""

    def __init__(self, layout: CacheLayout, policy: str = "lru", seed: int = 0, with_reference: bool = True) -> None:
        self.layout, self.policy = layout, POLICIES[policy]
        self.random = torch.Generator().manual_seed(seed)
        self.gpu = torch.device("cuda")
        self.pool = DevicePool(layout, self.gpu)
        self.pool.records.fill_(GARBAGE)
        self.state: LaunchState = new_launch_state(layout.num_layers, self.gpu)
        self.cpu_pool = DevicePool(layout, torch.device("cpu")) if with_reference else None
        shape = (layout.num_layers, layout.num_rows, layout.record_bytes)
        self.host = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        self.truth = torch.randint(0, 256, shape, dtype=torch.uint8, device=self.gpu)
        self.host.copy_(self.truth)
        self.page_table = torch.full((layout.max_requests, layout.max_pages), -1, dtype=torch.int32)
        self.step = 0
        self.selected = 0

    def give_pages(self, line: int, pages: list[int]) -> None:
        self.page_table[line] = -1
        self.page_table[line, : len(pages)] = torch.tensor(pages, dtype=torch.int32)

    def rows(self, line: int, positions: Tensor) -> Tensor:
        return rows_of(self.page_table[line], positions)

    # Operations, on both

    def insert(self, rows: Tensor) -> Tensor:
        """Begin a step; `rows` int64 [b] on the CPU, -1: padded. Writes new records through in every layer."""
        self.step += 1
        slots = ops.insert(
            self.pool.tables, self.pool.counters, self.state, rows.to(self.gpu), by_recency=self.policy.by_recency
        )
        real = rows >= 0
        for layer in range(self.layout.num_layers):
            records = torch.randint(0, 256, (len(rows), self.layout.record_bytes), dtype=torch.uint8, device=self.gpu)
            ops.write_through(records, slots[layer], rows.to(self.gpu), self.pool.records[layer], self.host[layer])
            self.truth[layer, rows[real].to(self.gpu)] = records[real.to(self.gpu)]
            if self.cpu_pool:
                reference.insert(self.cpu_pool.layer(layer), rows[real], self.step, self.policy)
        return slots

    def resolve(
        self,
        layer: int,
        selection: Tensor,
        lines: Tensor,
        *,
        plan: MissPlan | None = None,
        shape: tuple[int, int, int] | None = None,
    ) -> Tensor:
        """`selection` int32 [b, k] on the CPU; `lines` int64 [b], -1: padded. Checks every slot."""
        slots = torch.full(selection.shape, -77, dtype=torch.int32, device=self.gpu)
        ops.resolve(
            self.pool.tables, self.pool.counters, self.state, layer, selection.to(self.gpu), lines.to(self.gpu),
            self.page_table.to(self.gpu), self.host[layer], self.pool.records[layer], slots=slots, plan=plan,
            by_recency=self.policy.by_recency, shape=shape,
        )  # fmt: skip
        table = torch.where(lines[:, None] >= 0, self.page_table[lines.clamp(min=0)], -1)
        rows = rows_of(table, selection)
        self.check_slots(layer, rows, slots)
        self.selected += int((rows >= 0).sum())
        if self.cpu_pool:
            tables = self.cpu_pool.layer(layer)
            host, records = self.host[layer], self.cpu_pool.records[layer]
            resolved = reference.resolve(tables, rows, self.step, self.policy, host, records)
            counters = self.cpu_pool.counters
            counters.hits[layer] += resolved.hits
            counters.misses[layer] += resolved.misses
            counters.failed[layer] += resolved.failed
        return slots

    def rebuild(self) -> None:
        ops.rebuild_order(self.pool.tables, self.pool.counters, self.state, policy=self.policy.name)
        for layer in range(self.layout.num_layers if self.cpu_pool else 0):
            assert self.cpu_pool
            tables = self.cpu_pool.layer(layer)
            if order_is_due(tables, self.policy):
                reference.rebuild_order(tables, self.step, self.policy, 2 * self.step + 1)
                self.cpu_pool.counters.rebuilds[layer] += 1

    def release(self, rows: Tensor) -> None:
        ops.release(self.pool.tables, self.state, rows.to(self.gpu))
        for layer in range(self.layout.num_layers if self.cpu_pool else 0):
            assert self.cpu_pool
            reference.release(self.cpu_pool.layer(layer), rows)

    def stage(self, rows: Tensor) -> None:
        """Stage one chunk in every layer: a step of its own."""
        self.step += 1
        for layer in range(self.layout.num_layers):
            self._stage_layer(layer, rows)

    def _stage_layer(self, layer: int, rows: Tensor) -> None:
        records = torch.randint(0, 256, (len(rows), self.layout.record_bytes), dtype=torch.uint8, device=self.gpu)
        self.truth[layer, rows.to(self.gpu)] = records
        pool, host = self.pool.records[layer], self.host[layer]
        ops.stage(self.pool.tables, self.state, layer, records, rows.to(self.gpu), pool, host)
        torch.cuda.synchronize()
        if self.cpu_pool:
            tables, cpu_records = self.cpu_pool.layer(layer), self.cpu_pool.records[layer]
            reference.stage(tables, records.cpu(), rows, self.step, cpu_records, host.clone())

    # Checks

    def check_slots(self, layer: int, rows: Tensor, slots: Tensor) -> None:
        """Every pad is -1 and every other slot holds its row's bytes."""
        rows = rows.to(self.gpu)
        assert ((slots >= 0) == (rows >= 0)).all(), "a slot for a pad, or none for a record"
        wanted = rows >= 0
        got = self.pool.records[layer][slots[wanted].long()]
        assert torch.equal(got, self.truth[layer][rows[wanted]]), "a slot holds another record"

    def check(self) -> None:
        """The invariants of integrity.py, what launches leave behind, and agreement with the reference."""
        torch.cuda.synchronize()
        control = self.state.control.cpu()
        assert torch.equal(control[:, 0:2], control[:, 2:4]), "blocks arrived that are not done"
        assert (control[:, 7] == 0).all(), "a ticket is out"
        assert (control[:, 8] == 0).all(), "a rebuild is not finished"
        assert (self.state.bins == 0).all()
        for layer in range(self.layout.num_layers):
            tables = self.pool.layer(layer)
            assert (tables.slot_of_row >= -1).all(), "a miss is still pending"
            _check_tables(layer, tables)
            _check_records(layer, tables, self.pool.records[layer], self.host[layer])
            assert torch.equal(self.host[layer], self.truth[layer].cpu())
        if self.cpu_pool:
            self.check_against_reference()

    def check_against_reference(self) -> None:
        assert self.cpu_pool
        for layer in range(self.layout.num_layers):
            ours, theirs = self.pool.layer(layer), self.cpu_pool.layer(layer)
            assert int(ours.num_free) == int(theirs.num_free)
            assert int((ours.stamp == FREE).sum()) == int((theirs.stamp == FREE).sum())
            got = [int(count[layer]) for count in self.pool.counters]
            wanted = [int(count[layer]) for count in self.cpu_pool.counters]
            assert got[4] == wanted[4], "records without a slot"


def shuffled_pages(layout: CacheLayout, seed: int) -> list[int]:
    return torch.randperm(layout.num_pages, generator=torch.Generator().manual_seed(seed)).tolist()


def page_rows(pages: list[int]) -> Tensor:
    return (torch.tensor(pages)[:, None] * PAGE_RECORDS + torch.arange(PAGE_RECORDS)).flatten()
