"""The GPU backend of the cache: the operations of ops.py over both pools, all on torch's current stream.

See `hisparse.backend.Backend` for what each method promises. Nothing here reads back from the device. Steps are
launched one operation at a time; capturing a whole step in a CUDA graph is the engine's next step.
"""

import torch
from torch import Tensor

from hisparse.device_pool import STEP_LIMIT, DevicePool
from hisparse.host_pool import HostPool
from hisparse.kernels import ops
from hisparse.kernels.state import MissPlan, new_launch_state
from hisparse.layout import CacheLayout
from hisparse.order import Policy


class KernelBackend:
    """CUDA kernels over a pinned host pool and a device pool."""

    def __init__(self, layout: CacheLayout, policy: Policy, device: torch.device) -> None:
        self.policy = policy
        self.host_pool = HostPool(layout, pinned=True)
        self.device_pool = DevicePool(layout, device)
        self._state = new_launch_state(layout.num_layers, device)
        self._step_number = 0

    @property
    def step_number(self) -> int:
        """The step that runs, or that ended last. The host counts along; the device has its own."""
        return self._step_number

    @step_number.setter
    def step_number(self, step: int) -> None:
        self._step_number = step
        self._state.step.fill_(step)

    def begin_step(self, rows: Tensor) -> Tensor:
        """See `Backend`. Lists of victims that are due are made first, before anything claims from them."""
        self._tick()
        tables, counters = self.device_pool.tables, self.device_pool.counters
        ops.rebuild_order(tables, counters, self._state, policy=self.policy.name)
        return ops.insert(tables, counters, self._state, rows, by_recency=self.policy.by_recency)

    def write_through(self, layer: int, records: Tensor, slots: Tensor, rows: Tensor) -> None:
        """See `Backend`."""
        ops.write_through(records, slots, rows, self.device_pool.records[layer], self.host_pool.records[layer])

    def resolve(self, layer: int, selection: Tensor, request_index: Tensor, page_table: Tensor) -> Tensor:
        """See `Backend`."""
        return ops.resolve(
            self.device_pool.tables,
            self.device_pool.counters,
            self._state,
            layer,
            selection,
            request_index.int(),
            page_table,
            self.host_pool.records[layer],
            self.device_pool.records[layer],
            by_recency=self.policy.by_recency,
        )

    def stage(self, layer: int, records: Tensor, rows: Tensor) -> None:
        """See `Backend`. On the device a step of the layer's own; each layer stages each chunk, so one layer counts."""
        if layer == 0:
            self._tick()
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

    def _tick(self) -> None:
        """Count the step that the next launch begins on the device."""
        if self._step_number >= STEP_LIMIT:
            self.step_number = self.device_pool.rebase_stamps()
        self._step_number += 1
