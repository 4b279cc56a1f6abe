"""The GPU backend of the cache: the operations of ops.py over both pools, on three streams.

See `hisparse.backend.Backend` for what each method promises. Claims and fetches run on the caller's stream. Beside it
run the new records' write-through, forked at `append` and joined by the layer's resolve, and the making of orders,
forked after the resolve of a group's last layer and joined at the end of the step. Streams meet by events alone, so a
step can be captured in a CUDA graph: `HierarchicalCache.record_step`.
"""

import torch
from torch import Tensor

from hisparse.backend import Outcome
from hisparse.device_pool import STEP_LIMIT, Counters, DevicePool
from hisparse.host_memory import Progress
from hisparse.host_pool import HostPool
from hisparse.kernels import ops
from hisparse.kernels.preload import preload
from hisparse.kernels.side_stream import SideStream
from hisparse.kernels.state import MissPlan, new_launch_state
from hisparse.layout import CacheLayout
from hisparse.order import Policy

ORDER_GROUP = 8  # layers whose orders are made by one launch


class KernelBackend:
    """CUDA kernels over a pinned host pool and a device pool.

    Raises:
        BuildError: the kernels cannot be compiled or loaded here.
        HostMemoryError: the system does not give the host pool.
    """

    can_record = True

    def __init__(
        self, layout: CacheLayout, policy: Policy, device: torch.device, progress: Progress | None = None
    ) -> None:
        preload(layout.record_bytes, device)  # nothing may be compiled while a step is recorded
        self.policy = policy
        self.host_pool = HostPool(layout, pinned=True, progress=progress)
        self.device_pool = DevicePool(layout, device)
        self._state = new_launch_state(layout.num_layers, device)
        self._step_number = 0
        self._writer, self._orderer = SideStream(device), SideStream(device)
        self._reader = torch.cuda.Stream(device)
        self._resolved: set[int] = set()  # layers, since their group's orders were last made

    @property
    def step_number(self) -> int:
        """The step that runs, or that ended last. The host counts along; the device has its own."""
        return self._step_number

    @step_number.setter
    def step_number(self, step: int) -> None:
        self._step_number = step
        self._state.step.fill_(step)

    def begin_step(self) -> None:
        """See `Backend`. On the device the step begins with `insert`."""
        if self._step_number >= STEP_LIMIT:
            self.step_number = self.device_pool.rebase_stamps()
        self._step_number += 1

    def insert(self, rows: Tensor) -> Tensor:
        """See `Backend`."""
        tables, counters = self.device_pool.tables, self.device_pool.counters
        return ops.insert(tables, counters, self._state, rows, by_recency=self.policy.by_recency)

    def write_through(self, layer: int, records: Tensor, slots: Tensor, rows: Tensor) -> None:
        """See `Backend`."""
        pool, host = self.device_pool.records[layer], self.host_pool.records[layer]
        with self._writer.fork(layer, keep=(records, slots, rows)):
            ops.write_through(records, slots, rows, pool, host)

    def resolve(
        self, layer: int, selection: Tensor, request_index: Tensor, lengths: Tensor, page_table: Tensor
    ) -> Tensor:
        """See `Backend`."""
        self._orderer.join(layer // ORDER_GROUP)  # a layer's second resolve of the step claims from the order again
        if selection.shape[1] and selection.stride(1) != 1:
            selection = selection.contiguous()
        slots = ops.resolve(
            self.device_pool.tables,
            self.device_pool.counters,
            self._state,
            layer,
            selection,
            request_index,
            page_table,
            self.host_pool.records[layer],
            self.device_pool.records[layer],
            by_recency=self.policy.by_recency,
            lengths=lengths,
        )
        self._writer.join(layer)  # attention reads the new record's slot
        self._resolved.add(layer)
        if self._group(layer) <= self._resolved:
            self._make_orders(layer // ORDER_GROUP)
        return slots

    def end_step(self) -> None:
        """See `Backend`."""
        for group in sorted({layer // ORDER_GROUP for layer in self._resolved}):
            self._make_orders(group)
        self._writer.join_all()
        self._orderer.join_all()

    def outcome(self) -> Outcome:
        """See `Backend`: one small download."""
        words = torch.cat((self._state.step[:1].long(), self.device_pool.counters.failed))
        step_number, *failed = words.tolist()
        return Outcome(step_number, sum(failed))

    def read_counters(self) -> Counters:
        """See `Backend`: on a stream of its own, so a graph that runs goes on, and the last counts may be missing."""
        with torch.cuda.stream(self._reader):
            return Counters(*self.device_pool.all_counters.cpu())

    def stage(self, layer: int, records: Tensor, rows: Tensor) -> None:
        """See `Backend`. On the device a step of the layer's own; each layer stages each chunk, so one layer counts."""
        if layer == 0:
            self.begin_step()
        host, pool = self.host_pool.records[layer], self.device_pool.records[layer]
        ops.stage(self.device_pool.tables, self._state, layer, records, rows, pool, host)

    def fetch(self, layer: int, rows: Tensor, out: Tensor) -> None:
        """See `Backend`. A miss plan whose slots are the lines of `out`."""
        lines = torch.arange(rows.numel(), dtype=torch.int32, device=rows.device)
        count = torch.full((), rows.numel(), dtype=torch.int32, device=rows.device)
        ops.replay(MissPlan(rows.int(), lines, count), self.host_pool.records[layer], out)

    def release(self, rows: Tensor) -> None:
        """See `Backend`."""
        ops.release(self.device_pool.tables, self._state, rows)

    def _group(self, layer: int) -> set[int]:
        first = layer // ORDER_GROUP * ORDER_GROUP
        return set(range(first, min(first + ORDER_GROUP, len(self.device_pool.records))))

    def _make_orders(self, group: int) -> None:
        """Make the orders of a group's layers anew where they are due; the device decides which."""
        layers = self._group(group * ORDER_GROUP)
        with self._orderer.fork(group):
            ops.rebuild_order(
                self.device_pool.tables,
                self.device_pool.counters,
                self._state,
                policy=self.policy.name,
                first_layer=min(layers),
                num_layers=len(layers),
            )
        self._resolved -= layers
