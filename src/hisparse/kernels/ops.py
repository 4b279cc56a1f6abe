"""The operations on a device pool, on the GPU: one function for each of `reference/`, which specifies it.

Each is registered with `torch.library` and says what it changes. All take the tables of all layers and number the
layer: a layer of tables is an index group of the model, whose layers have records of their own. None reads back to the
CPU, and all run on torch's current stream. The current step is kept on the device: `insert` begins one in every layer.
"""

import torch
from torch import Tensor

from hisparse.device_pool import Counters, SlotTables
from hisparse.kernels.checks import (
    check_length,
    check_plan,
    check_pools,
    check_records,
    check_shape,
    check_tensor,
)
from hisparse.kernels.copies import launch_replay, launch_stage, launch_write_through
from hisparse.kernels.registration import register
from hisparse.kernels.resolve import check_size, empty_slots, launch_resolve
from hisparse.kernels.state import LaunchState, MissPlan
from hisparse.kernels.tables import (
    MOST_ROWS,
    POLICY_NUMBERS,
    launch_insert,
    launch_rebuild_order,
    launch_release,
)
from hisparse.order import POLICIES


def resolve(
    tables: SlotTables,
    counters: Counters,
    state: LaunchState,
    layer: int,
    selection: Tensor,
    request_index: Tensor,
    page_table: Tensor,
    host: Tensor,
    pool: Tensor,
    *,
    by_recency: bool,
    lengths: Tensor | None = None,
    slots: Tensor | None = None,
    plan: MissPlan | None = None,
    begins_step: bool = False,
    io: bool = True,
    shape: tuple[int, int, int] | None = None,
) -> Tensor:
    """Bring every selected record into the layer's device pool and say where it is.

    Args:
        tables: of all layers.
        counters: of all layers; hits, misses, exhausted and failed go up.
        state: of the device pool.
        layer: which one.
        selection: int32 [b, k] positions, distinct in a line, negative: pad. Lines may be strided.
        request_index: int64 [b], each request's line in the page table; -1: padded request.
        page_table: int32 [max_requests, max_pages], -1: no page.
        host: uint8 [rows, record_bytes], the layer's part of the host pool, pinned.
        pool: uint8 [N, record_bytes], the layer's slots.
        by_recency: of the policy (order.py).
        lengths: int64 [b], positions in each request's history; later ones count as pads. Not given: no limit.
        slots: where to put the answer, int32 [b, k] contiguous; made if not given.
        plan: where to record the misses for `replay`, at least b * k entries.
        begins_step: no `insert` came before; this launch begins the layer's next step.
        io: False is the no-IO oracle: the tables move on, the records do not, and outputs are invalid.
        shape: blocks, threads and copying threads, to override the choice.

    Returns:
        int32 [b, k] slots, -1 for a pad, a position that has no page, and a record that found no slot.

    Raises:
        ValueError: an argument of another dtype, shape, stride or device.
        BuildError: the kernel cannot be compiled or launched here.
    """
    check_tensor(selection, "selection", torch.int32, pool, 2, last_stride_only=True)
    check_tensor(request_index, "request_index", torch.int64, pool, 1)
    check_tensor(page_table, "page_table", torch.int32, pool, 2)
    if lengths is not None:
        check_tensor(lengths, "lengths", torch.int64, pool, 1)
    check_records(host, pool)
    check_pools(tables, layer, host, pool)
    check_size(selection.numel())
    if plan is not None:
        check_plan(plan, pool, selection.numel())
    if shape is not None:
        check_shape(shape)
    for name, tensor in (("request_index", request_index), ("lengths", lengths)):
        if tensor is not None and tensor.shape[0] != selection.shape[0]:
            raise ValueError(
                f"{name} must have one entry a line of the selection, {selection.shape[0]}, got {tensor.shape[0]}"
            )
    out = empty_slots(selection) if slots is None else slots
    check_tensor(out, "slots", torch.int32, pool, 2)
    if out.shape != selection.shape:
        raise ValueError(f"slots must have the selection's shape {list(selection.shape)}, got {list(out.shape)}")
    torch.ops.hisparse.resolve(
        list(tables), list(counters), state.control, selection, request_index, lengths, page_table, host,
        pool, out,
        list(plan or ()), layer, by_recency, begins_step, io, list(shape or ()),
    )  # fmt: skip
    return out


def replay(plan: MissPlan, host: Tensor, pool: Tensor) -> None:
    """Fetch what a miss plan names into another layer of the index group; copy only.

    Args:
        plan: of the anchor's resolve in this step.
        host: uint8 [rows, record_bytes], the shared layer's part of the host pool, pinned.
        pool: uint8 [N, record_bytes], the shared layer's slots; the anchor's tables are its tables.
    """
    check_records(host, pool)
    check_plan(plan, pool, 0)
    torch.ops.hisparse.replay(list(plan), host, pool)


def insert(
    tables: SlotTables,
    counters: Counters,
    state: LaunchState,
    rows: Tensor,
    *,
    by_recency: bool,
    slots: Tensor | None = None,
) -> Tensor:
    """Begin a step in every layer, and claim a slot in each for the record that each request will produce.

    Args:
        tables: of all layers.
        counters: of all layers.
        state: of the device pool.
        rows: int64 [b], distinct; -1: padded request.
        by_recency: of the policy.
        slots: where to put the answer; made if not given.

    Returns:
        int32 [layers, b] slots; -1 for a padded request and a record that found no slot.
    """
    check_tensor(rows, "rows", torch.int64, tables.stamp, 1)
    shape = (tables.stamp.shape[0], rows.shape[0])
    out = torch.empty(shape, dtype=torch.int32, device=rows.device) if slots is None else slots
    check_tensor(out, "slots", torch.int32, rows, 2)
    if out.shape != shape:
        raise ValueError(f"slots must be {list(shape)}, one for each layer and row, got {list(out.shape)}")
    if rows.shape[0] > MOST_ROWS:
        raise ValueError(f"insert takes at most {MOST_ROWS} rows, got {rows.shape[0]}")
    torch.ops.hisparse.insert(list(tables), list(counters), state.control, rows, out, by_recency)
    return out


def write_through(records: Tensor, slots: Tensor, rows: Tensor, pool: Tensor, host: Tensor) -> None:
    """Write each record to its slot and, from the same source, to the host pool.

    Args:
        records: uint8 [n, record_bytes] on the device.
        slots: int32 [n], -1: no slot.
        rows: int64 [n], -1: no row.
        pool: uint8 [N, record_bytes], one layer's slots.
        host: uint8 [rows, record_bytes], that layer's part of the host pool, pinned.
    """
    check_tensor(records, "records", torch.uint8, pool, 2)
    check_tensor(slots, "slots", torch.int32, pool, 1)
    check_tensor(rows, "rows", torch.int64, pool, 1)
    check_records(host, pool, records)
    check_length(slots, "slots", records.shape[0])
    check_length(rows, "rows", records.shape[0])
    torch.ops.hisparse.write_through(records, slots, rows, pool, host)


def stage(
    tables: SlotTables, state: LaunchState, layer: int, records: Tensor, rows: Tensor, pool: Tensor, host: Tensor
) -> None:
    """Write prefill records to the host pool and, as far as slots are free, into slots of one layer.

    It is a step of the layer's own: what it stages is newer than everything that a list of victims names.

    Args:
        tables: of all layers.
        state: of the device pool.
        layer: which one.
        records: uint8 [n, record_bytes] on the device.
        rows: int64 [n], distinct, in no slot.
        pool: uint8 [N, record_bytes], the layer's slots.
        host: uint8 [rows, record_bytes], the layer's part of the host pool, pinned.
    """
    check_tensor(records, "records", torch.uint8, pool, 2)
    check_tensor(rows, "rows", torch.int64, pool, 1)
    check_records(host, pool, records)
    check_pools(tables, layer, host, pool)
    check_length(rows, "rows", records.shape[0])
    torch.ops.hisparse.stage(list(tables), state.control, records, rows, pool, host, layer)


def release(tables: SlotTables, state: LaunchState, rows: Tensor) -> None:
    """Free the slots of `rows` (int64 [n], distinct, -1: none) in every layer."""
    check_tensor(rows, "rows", torch.int64, tables.stamp, 1)
    torch.ops.hisparse.release(list(tables), state.control, rows)


def rebuild_order(
    tables: SlotTables,
    counters: Counters,
    state: LaunchState,
    *,
    policy: str,
    first_layer: int = 0,
    num_layers: int | None = None,
) -> None:
    """Make the lists of victims anew in those of the layers whose list is due; the device decides which.

    Meant for a side stream: forked after the last layer's resolve, joined before the first one's next claim.

    Args:
        tables: of all layers.
        counters: of all layers; rebuilds go up.
        state: of the device pool.
        policy: one of order.py's; those that are heated bring the heat of the slots' rows up to date first.
        first_layer: where to begin.
        num_layers: how many; default: all that follow.
    """
    if policy not in POLICY_NUMBERS:
        raise ValueError(f"policy must be one of {', '.join(POLICY_NUMBERS)}, got {policy!r}")
    most = tables.stamp.shape[0] - first_layer
    count = most if num_layers is None else num_layers
    if first_layer < 0 or not 0 < count <= most:
        raise ValueError(f"there are layers 0 to {tables.stamp.shape[0] - 1}, got {count} from {first_layer} on")
    if POLICIES[policy].heated and state.heat.shape[1:] != tables.slot_of_row.shape:
        raise ValueError(
            f"the policy {policy!r} needs a launch state with the heat of all rows, {list(tables.slot_of_row.shape)}, "
            f"got {list(state.heat.shape[1:])}: new_launch_state(..., heated_rows=...)"
        )
    torch.ops.hisparse.rebuild_order(
        list(tables), list(counters), state.control, state.bins, state.heat, first_layer, count, policy
    )


register(
    "resolve(Tensor(a!)[] tables, Tensor(b!)[] counters, Tensor(c!) control, Tensor selection, "
    "Tensor request_index, Tensor? lengths, Tensor page_table, Tensor host, Tensor(d!) pool, Tensor(e!) slots, "
    "Tensor(f!)[] plan, int layer, bool by_recency, bool begins_step, bool io, int[] shape)",
    launch_resolve,
)
register("replay(Tensor[] plan, Tensor host, Tensor(a!) pool)", launch_replay)
register(
    "insert(Tensor(a!)[] tables, Tensor(b!)[] counters, Tensor(c!) control, Tensor rows, Tensor(d!) slots, "
    "bool by_recency)",
    launch_insert,
)
register(
    "write_through(Tensor records, Tensor slots, Tensor rows, Tensor(a!) pool, Tensor(b!) host)",
    launch_write_through,
)
register(
    "stage(Tensor(a!)[] tables, Tensor(b!) control, Tensor records, Tensor rows, Tensor(c!) pool, Tensor(d!) host, "
    "int layer)",
    launch_stage,
)
register("release(Tensor(a!)[] tables, Tensor(b!) control, Tensor rows)", launch_release)
register(
    "rebuild_order(Tensor(a!)[] tables, Tensor(b!)[] counters, Tensor(c!) control, Tensor(d!) bins, "
    "Tensor(e!) heat, "
    "int first_layer, int num_layers, str policy)",
    launch_rebuild_order,
)
