"""The GPU backend of the cache: the operations of ops.py over both pools, on several streams.

See `hisparse.backend.Backend` for what each method promises. Claims and an anchor's fetches run on the caller's
stream. Beside it run the new records' write-through, forked at `append` and joined by the layer's resolve; the shared
layers' fetches, forked after the anchor's resolve and joined one by one; and the making of orders, forked when some
groups are resolved and joined at the end of the step, behind the marking of what a selector ranks next, for a policy
that asks for it. Streams meet by events alone, so a step can be captured in a CUDA graph:
`HierarchicalCache.record_step`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hisparse.backend import BackendOptions, Outcome
from hisparse.device_pool import STEP_LIMIT, Counters, DevicePool
from hisparse.heat import mark_ranked
from hisparse.host_pool import HostPool
from hisparse.kernels import ops
from hisparse.kernels.preload import preload
from hisparse.kernels.side_stream import SideStream
from hisparse.kernels.state import MissPlan, new_launch_state, new_miss_plan
from hisparse.layout import CacheLayout
from hisparse.order import RANKED
from hisparse.ranking import Best

ORDER_BATCH = 8  # index groups whose orders are made by one launch


class KernelBackend:
    """CUDA kernels over a pinned host pool and a device pool.

    Raises:
        BuildError: the kernels cannot be compiled or loaded here.
        HostMemoryError, DeviceMemoryError: there is not so much memory.
    """

    can_record = True

    def __init__(self, layout: CacheLayout, options: BackendOptions, device: torch.device) -> None:
        preload(layout.record_bytes, device, io=options.io)  # nothing may be compiled while a step is recorded
        self.policy = options.policy
        self.host_pool = options.host_pool or HostPool(layout, pinned=True, progress=options.progress)
        self.device_pool = DevicePool(layout, device)
        self._layout, self._options = layout, options
        heated_rows = layout.num_rows if options.policy.heated else 0
        self._state = new_launch_state(len(layout.groups), device, heated_rows=heated_rows)
        self._step_number = 0
        self._writer, self._fetcher, self._orderer = SideStream(device), SideStream(device), SideStream(device)
        self._reader = torch.cuda.Stream(device)
        self._resolved: set[int] = set()  # index groups whose orders were not made since
        size = layout.max_requests * layout.top_k
        self._plans = {anchor: new_miss_plan(size, device) for anchor in layout.groups if layout.shared_layers(anchor)}
        torch.cuda.synchronize(device)  # the reader's stream has never waited for the zeros
        self._waiting: set[int] = set()  # shared layers that have not got their anchor's misses yet

    @property
    def step_number(self) -> int:
        """The step that runs, or that ended last. The host counts along; the device has its own."""
        return self._step_number

    @step_number.setter
    def step_number(self, step: int) -> None:
        self._step_number = step
        self._state.step.fill_(step)

    def make_room_for_step(self) -> None:
        """See `Backend`."""
        if self._step_number >= STEP_LIMIT:
            self.step_number = self.device_pool.rebase_stamps()

    def note_step(self, number: int) -> None:
        """See `Backend`."""
        self._step_number = number

    def insert(self, rows: Tensor) -> Tensor:
        """See `Backend`."""
        tables, counters = self.device_pool.tables, self.device_pool.counters
        slots = ops.insert(tables, counters, self._state, rows, by_recency=self.policy.by_recency)
        if not torch.cuda.is_current_stream_capturing():
            self._step_number += 1
        return slots

    def write_through(self, layer: int, records: Tensor, slots: Tensor, rows: Tensor) -> None:
        """See `Backend`."""
        pool, host = self.device_pool.records[layer], self.host_pool.records[layer]
        with self._writer.fork(layer, keep=(records, slots, rows)):
            ops.write_through(records, slots, rows, pool, host)

    def resolve(
        self,
        layer: int,
        selection: Tensor,
        request_index: Tensor,
        lengths: Tensor,
        page_table: Tensor,
        best: Best | None = None,
    ) -> Tensor:
        """See `Backend`."""
        group, shared = self._layout.group_of[layer], self._layout.shared_layers(layer)
        self._orderer.join(group // ORDER_BATCH)  # a second resolve in the step claims from the order again
        for follower in shared:
            self._fetch_shared(follower)  # ... and writes the plan anew
        if selection.shape[1] and selection.stride(1) != 1:
            selection = selection.contiguous()
        slots = ops.resolve(
            self.device_pool.tables,
            self.device_pool.counters,
            self._state,
            group,
            selection,
            request_index,
            page_table,
            self.host_pool.records[layer],
            self.device_pool.records[layer],
            by_recency=self.policy.by_recency,
            lengths=lengths,
            plan=self._plans.get(layer),
            io=self._options.io,
        )
        self._note_misses(shared)
        if self.policy.ranked and best is not None:
            self._mark_ranked(group, best, page_table, request_index)
        self._note_resolved(group)
        self._writer.join(layer)  # attention reads the new record's slot
        return slots

    def follow(self, layer: int) -> None:
        """See `Backend`."""
        self._fetch_shared(layer)
        self._writer.join(layer)

    def end_step(self) -> None:
        """See `Backend`."""
        for layer in sorted(self._waiting):
            self._fetch_shared(layer)
        for batch in sorted({group // ORDER_BATCH for group in self._resolved}):
            self._make_orders(batch)
        for side in (self._writer, self._fetcher, self._orderer):
            side.join_all()

    def forget_step(self) -> None:
        """See `Backend`."""
        for side in (self._writer, self._fetcher, self._orderer):
            side.forget()
        self._waiting.clear()
        self._resolved.clear()

    def outcome(self) -> Outcome:
        """See `Backend`: one small download."""
        words = torch.cat((self._state.step[:1], self._state.inserted[:1])).long()
        step_number, inserted, *failed = torch.cat((words, self.device_pool.counters.failed)).tolist()
        return Outcome(step_number, inserted % 2**32, sum(failed))

    def read_counters(self) -> Counters:
        """See `Backend`: on a stream of its own, so a graph that runs goes on, and the last counts may be missing."""
        with torch.cuda.stream(self._reader):
            return Counters(*self.device_pool.all_counters.cpu())

    def read_free_slots(self) -> int:
        """See `Backend`: on the same stream."""
        with torch.cuda.stream(self._reader):
            return int(self.device_pool.tables.num_free.cpu().sum())

    def stage(self, layer: int, records: Tensor, rows: Tensor) -> None:
        """See `Backend`. On the device a step of the group's own; each group stages each chunk, so one group counts."""
        host, pool = self.host_pool.records[layer], self.device_pool.records[layer]
        group = self._layout.group_of[layer]
        if self._layout.anchors[layer] != layer:
            ops.write_through(records, self.device_pool.groups[group].slot_of_row[rows], rows, pool, host)
            return
        if group == 0:
            self.make_room_for_step()
        ops.stage(self.device_pool.tables, self._state, group, records, rows, pool, host)
        if group == 0:
            self._step_number += 1

    def fetch(self, layer: int, rows: Tensor, out: Tensor) -> None:
        """See `Backend`. A miss plan whose slots are the lines of `out`."""
        lines = torch.arange(rows.numel(), dtype=torch.int32, device=rows.device)
        count = torch.full((), rows.numel(), dtype=torch.int32, device=rows.device)
        ops.replay(MissPlan(rows.int(), lines, count), self.host_pool.records[layer], out)

    def release(self, rows: Tensor) -> None:
        """See `Backend`."""
        ops.release(self.device_pool.tables, self._state, rows)
        if self.policy.heated:
            self._state.heat[0].index_fill_(1, rows[rows >= 0], 0)

    def _mark_ranked(self, group: int, best: Best, page_table: Tensor, request_index: Tensor) -> None:
        """Beside the caller's stream, before the group's order is made on the same one."""
        self._orderer.join(("ranks", group - 2))  # few selectors' scores are kept at one time
        with self._orderer.fork(("ranks", group), keep=(best, page_table, request_index)):
            positions, pages = best(RANKED * self._layout.top_k).positions, page_table[request_index]
            mark_ranked(self.device_pool.groups[group], positions, pages, self._state.step[group])

    def _note_misses(self, shared: Sequence[int]) -> None:
        """Shared layers lack their anchor's misses. Prefetched, they are sent off beside the caller's stream."""
        if self._options.io:
            self._waiting.update(shared)
            for layer in shared if self._options.prefetch else ():
                with self._fetcher.fork(layer):
                    self._replay(layer)

    def _note_resolved(self, group: int) -> None:
        """Send off the making of orders once a batch of groups is resolved."""
        self._resolved.add(group)
        if self._order_batch(group // ORDER_BATCH) <= self._resolved:
            self._make_orders(group // ORDER_BATCH)

    def _fetch_shared(self, layer: int) -> None:
        """The caller's stream goes on when the layer has its anchor's misses, if it has not yet."""
        if layer not in self._waiting:
            return
        self._waiting.remove(layer)
        if self._options.prefetch:
            self._fetcher.join(layer)
        else:
            self._replay(layer)

    def _replay(self, layer: int) -> None:
        plan = self._plans[self._layout.anchors[layer]]
        ops.replay(plan, self.host_pool.records[layer], self.device_pool.records[layer])

    def _order_batch(self, batch: int) -> set[int]:
        first = batch * ORDER_BATCH
        return set(range(first, min(first + ORDER_BATCH, len(self.device_pool.groups))))

    def _make_orders(self, batch: int) -> None:
        """Make the orders of a batch of groups anew where they are due; the device decides which."""
        groups = self._order_batch(batch)
        with self._orderer.fork(batch):
            ops.rebuild_order(
                self.device_pool.tables,
                self.device_pool.counters,
                self._state,
                policy=self.policy.name,
                first_layer=min(groups),
                num_layers=len(groups),
            )
        self._resolved -= groups
