"""A graph may be traced through the operations without a GPU: their fake implementations know what they change."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hisparse.device_pool import DevicePool
from hisparse.kernels import ops
from hisparse.kernels.state import new_launch_state, new_miss_plan
from hisparse.layout import CacheLayout

LAYOUT = CacheLayout(
    num_layers=2, record_bytes=32, top_k=4, device_buffer_size=6, max_requests=2, num_pages=8, num_slots=12
)


def test_every_operation_can_be_traced() -> None:
    with FakeTensorMode():
        device = torch.device("meta")
        pool = DevicePool(LAYOUT, device)
        state = new_launch_state(2, device)
        host = torch.empty(LAYOUT.num_rows, 32, dtype=torch.uint8, device=device)
        records = torch.empty(2, 32, dtype=torch.uint8, device=device)
        rows, lines = torch.zeros(2, 2, dtype=torch.int64, device=device)
        plan = new_miss_plan(8, device)
        table = torch.zeros(2, 8, dtype=torch.int32, device=device)
        new = ops.insert(pool.tables, pool.counters, state, rows, by_recency=True)
        assert (new.shape, new.dtype) == ((2, 2), torch.int32)
        ops.write_through(records, new[0], rows, pool.records[0], host)
        selection = torch.zeros(2, 4, dtype=torch.int32, device=device)
        slots = ops.resolve(
            pool.tables, pool.counters, state, 0, selection, lines, table, host, pool.records[0],
            by_recency=True, plan=plan,
        )  # fmt: skip
        assert (slots.shape, slots.dtype) == ((2, 4), torch.int32)
        ops.replay(plan, host, pool.records[1])
        ops.stage(pool.tables, state, 1, records, rows, pool.records[1], host)
        ops.release(pool.tables, state, rows)
        ops.rebuild_order(pool.tables, pool.counters, state, policy="lru")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layer": 2}, "layer must be 0 to 1, got 2"),
        ({"host": (100, 32)}, "host must have the 512 rows that the tables number, got 100"),
        ({"pool": (13, 32)}, "pool must have the 12 slots of the tables, got 13"),
        ({"plan": 7}, "plan.rows must have room for 8 misses, got 7"),
        ({"shape": (4, 64, 16)}, "shape must be blocks, threads and copying threads"),
        ({"shape": (4, 64, 96)}, "copying threads at most threads"),
        ({"lines": 3}, "request_index must have one entry a line of the selection, 2, got 3"),
        ({"lengths": 1}, "lengths must have one entry a line of the selection, 2, got 1"),
    ],
)
def test_what_would_write_out_of_bounds_is_refused(arguments: dict[str, Any], message: str) -> None:
    device = torch.device("meta")
    pool = DevicePool(LAYOUT, device)
    state = new_launch_state(2, device)
    given: dict[str, Any] = {
        "layer": 0,
        "host": (512, 32),
        "pool": (12, 32),
        "plan": 8,
        "lines": 2,
        "lengths": 2,
    } | arguments

    def empty(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(given[name], dtype=dtype, device=device)

    with pytest.raises(ValueError, match=message):
        ops.resolve(
            pool.tables, pool.counters, state, given["layer"], torch.zeros(2, 4, dtype=torch.int32, device=device),
            empty("lines", torch.int64), torch.zeros(2, 8, dtype=torch.int32, device=device),
            empty("host", torch.uint8), empty("pool", torch.uint8), by_recency=True,
            lengths=empty("lengths", torch.int64), plan=new_miss_plan(given["plan"], device),
            shape=given.get("shape"),
        )  # fmt: skip
