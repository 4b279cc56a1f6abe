"""What a resolve bench drives: a pinned host pool with known contents, and device pools that replay a trace.

A step resolves each layer's selection and makes the layers' orders anew on a side stream, in two groups of
layers: forked after the group's resolves, joined before its next ones, so that making orders is off the path.
Layers have tables and slots of their own and read one host pool, to save pinning time, unless they are given ranges of
their own.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hisparse.bench.resolve_setup import Setup
from hisparse.bench.timing import recorded
from hisparse.device_pool import Counters, DevicePool, SlotTables
from hisparse.errors import HiSparseError
from hisparse.host_memory import allocate
from hisparse.kernels import ops
from hisparse.kernels.state import LaunchState, new_launch_state, new_miss_plan
from hisparse.layout import PAGE_RECORDS
from hisparse.order import POLICIES

MULTIPLIER, INCREMENT = 0x9E3779B97F4A7C15 - 2**64, 12345  # the host pool's contents


class HostRecords:
    """A pinned host pool for some requests, with its contents on the device to check against."""

    def __init__(self, setup: Setup, requests: int) -> None:
        self.requests, self.pages_each, self.shuffled = requests, setup.pages_each, setup.shuffled_pages
        shape = (setup.host_ranges, requests * setup.pages_each * PAGE_RECORDS, setup.record_bytes)
        words = torch.arange(math.prod(shape) // 8, device="cuda").mul_(MULTIPLIER).add_(INCREMENT)
        self.truth = words.view(torch.uint8).view(shape)  # [ranges, rows, record_bytes]
        self.records = allocate(shape, pinned=True)
        self.records.copy_(self.truth)
        self._lines = setup.trace.lines

    def page_table(self, requests: int, layer: int, num_layers: int) -> Tensor:
        """A layer's page table, int32 [requests, pages]: these requests' share of the host pool.

        Pages follow each other, as the cache hands them out at first, or are shuffled. The layers read different
        rows. What a batch reads from grows with it: past 2 GB the link gets slower.
        """
        num_pages = requests * self.pages_each
        order = torch.arange(num_pages)
        if self.shuffled:
            order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(0))
        shifted = (order + layer * (num_pages // num_layers)) % num_pages
        return shifted.int().view(requests, self.pages_each).cuda()

    def rows(self, page_table: Tensor, selection: Tensor) -> Tensor:
        """int64 [b, k]."""
        of_lines = page_table.repeat_interleave(self._lines, dim=0)
        page = of_lines.gather(1, selection.long() // PAGE_RECORDS)
        rows: Tensor = page.long() * PAGE_RECORDS + selection % PAGE_RECORDS
        return rows


class Snapshot(NamedTuple):
    """A copy of everything that a step changes, except the records."""

    tables: SlotTables
    counters: Counters
    state: LaunchState


class BenchPool:
    """Layers' pools for the first `batch` requests, and the steps that drive them."""

    def __init__(self, setup: Setup, batch: int, host: HostRecords) -> None:
        self.setup, self.batch, self.host = setup, batch, host
        device = torch.device("cuda")
        traced = torch.from_numpy(setup.trace.selections[:, :, :batch].copy()).to(device)
        self.selections = traced.expand(-1, setup.layers, -1, -1)  # [steps, layers, b, k]
        self.padding = torch.full(traced.shape[2:], -1, dtype=torch.int32, device=device)
        self.pool = DevicePool(setup.layout(batch, host.requests), device)
        heated_rows = self.pool.tables.slot_of_row.shape[1] if POLICIES[setup.policy].heated else 0
        self.state = new_launch_state(setup.layers, device, heated_rows=heated_rows)
        self.lines = torch.arange(batch, device=device) // setup.trace.lines
        self.slots = torch.empty(setup.layers, *traced.shape[2:], dtype=torch.int32, device=device)
        requests = setup.requests(batch)
        self.page_tables = [host.page_table(requests, layer, setup.layers) for layer in range(setup.layers)]
        self.plan = new_miss_plan(batch * setup.trace.k, device) if setup.followers else None
        self.main, self.side = torch.cuda.Stream(), torch.cuda.Stream()
        self.by_recency = POLICIES[setup.policy].by_recency
        half = setup.layers // 2
        self.groups = [group for group in (range(half), range(half, setup.layers)) if group]

    def resolve(self, selection: Tensor, layer: int, *, io: bool) -> None:
        """One call, and those of the layers that follow."""
        anchor, *followers = self._group(layer)
        ops.resolve(
            self.pool.tables, self.pool.counters, self.state, layer, selection, self.lines,
            self.page_tables[layer], self._host_of(anchor), self.pool.records[anchor], by_recency=self.by_recency,
            slots=self.slots[layer], plan=self.plan, begins_step=True, io=io, shape=self.setup.shape,
        )  # fmt: skip
        if io and self.plan is not None:
            for follower in followers:
                ops.replay(self.plan, self._host_of(follower), self.pool.records[follower])

    def rebuild(self, layers: range) -> None:
        """Make the orders of these layers anew where they are due."""
        ops.rebuild_order(
            self.pool.tables, self.pool.counters, self.state,
            policy=self.setup.policy, first_layer=layers.start, num_layers=len(layers),
        )  # fmt: skip

    def warm_up(self) -> None:
        """The steps that are not counted, one by one; nothing is compiled later, inside a capture."""
        torch.cuda.synchronize()  # the tables were made on another stream
        with torch.cuda.stream(self.main):
            for step in range(self.setup.warm_steps):
                self._whole_step(step)
            before = self.snapshot()
            for io in (True, False):
                self.resolve(self.padding, 0, io=io)
            self.rebuild(self.groups[0])
            self.restore(before)
        torch.cuda.synchronize()

    def run_checked(self) -> None:
        """All counted steps, one by one, each slot compared with its host row."""
        with torch.cuda.stream(self.main):
            for step in range(self.setup.warm_steps, self.setup.trace.steps):
                self._whole_step(step)
                for layer in range(self.setup.layers):
                    self._check(step, layer)
        torch.cuda.synchronize()

    def replay_checked(self, graph: torch.cuda.CUDAGraph) -> None:
        """The graph that is timed, overlaps and all, going on from where the tables are; its last step compared."""
        with torch.cuda.stream(self.main):
            graph.replay()
            for layer in range(self.setup.layers):
                self._check(self.setup.trace.steps - 1, layer)
        torch.cuda.synchronize()

    def advance(self, steps: int) -> None:
        """The first counted steps, one by one, and then a fresh order in every layer."""
        with torch.cuda.stream(self.main):
            for step in range(self.setup.warm_steps, self.setup.warm_steps + steps):
                self._whole_step(step)
            self.pool.tables.cursor.copy_(self.pool.tables.listed)
            self._rebuild_all()
        torch.cuda.synchronize()

    def capture(
        self,
        *,
        io: bool = True,
        rebuild: bool = True,
        padding: bool = False,
        events: list[torch.cuda.Event] | None = None,
        steps: range | None = None,
    ) -> torch.cuda.CUDAGraph:
        """The counted steps as one graph.

        Args:
            io: fetch records.
            rebuild: make orders on the side stream.
            padding: selections of pads alone: what the launches cost that have nothing to do.
            events: gets one before and one after each call.
            steps: others than the counted ones.
        """
        graph = torch.cuda.CUDAGraph()
        joins: dict[range, torch.cuda.Event] = {}
        with torch.cuda.graph(graph, stream=self.main):
            for step in steps or range(self.setup.warm_steps, self.setup.trace.steps):
                for group in self.groups:
                    if group in joins:
                        self.main.wait_event(joins[group])
                    for layer in group:
                        selection = self.padding if padding else self.selections[step, layer]
                        self._capture_call(selection, layer, io, events)
                    if rebuild:
                        joins[group] = self._fork_rebuild(group)
            if rebuild:
                self.main.wait_stream(self.side)
        return graph

    def snapshot(self) -> Snapshot:
        """What to go back to, complete before anything else runs, on whatever stream."""
        taken = Snapshot(
            SlotTables(*(table.clone() for table in self.pool.tables)),
            Counters(*(counter.clone() for counter in self.pool.counters)),
            LaunchState(*(part.clone() for part in self.state)),
        )
        torch.cuda.synchronize()
        return taken

    def restore(self, before: Snapshot) -> None:
        """Go back to a snapshot."""
        now = (*self.pool.tables, *self.pool.counters, *self.state)
        for changed, kept in zip(now, (*before.tables, *before.counters, *before.state), strict=True):
            changed.copy_(kept)
        torch.cuda.synchronize()

    def _whole_step(self, step: int) -> None:
        for layer in range(self.setup.layers):
            self.resolve(self.selections[step, layer], layer, io=True)
        self._rebuild_all()

    def _rebuild_all(self) -> None:
        for group in self.groups:
            self.rebuild(group)

    def _check(self, step: int, layer: int) -> None:
        rows = self.host.rows(self.page_tables[layer], self.selections[step, layer]).flatten()
        slots = self.slots[layer].long().flatten()
        for one in self._group(layer):
            truth = self.host.truth[one % len(self.host.truth)]
            if not torch.equal(self.pool.records[one][slots], truth[rows]):
                raise HiSparseError(f"step {step}, layer {one}: a slot holds another record than its row")

    def _group(self, layer: int) -> range:
        """The layers of a selection: its own and those that follow."""
        size = 1 + self.setup.followers
        return range(layer * size, (layer + 1) * size)

    def _host_of(self, layer: int) -> Tensor:
        return self.host.records[layer % len(self.host.records)]

    def _capture_call(self, selection: Tensor, layer: int, io: bool, events: list[torch.cuda.Event] | None) -> None:
        if events is not None:
            events.append(recorded(self.main, external=True))
        self.resolve(selection, layer, io=io)
        if events is not None:
            events.append(recorded(self.main, external=True))

    def _fork_rebuild(self, group: range) -> torch.cuda.Event:
        self.side.wait_event(recorded(self.main))
        with torch.cuda.stream(self.side):
            self.rebuild(group)
            return recorded(self.side)
