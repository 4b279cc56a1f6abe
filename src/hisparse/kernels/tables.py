"""Launch cuda/insert.cu, cuda/release.cu and cuda/rebuild_order.cu: what moves no records."""

import torch
from torch import Tensor

from hisparse.device_pool import Counters, SlotTables
from hisparse.kernels.launch import Kernel, launch, load
from hisparse.kernels.params import (
    InsertParams,
    RebuildOrderParams,
    ReleaseParams,
    counters_struct,
    tables_struct,
)
from hisparse.kernels.state import NUM_BINS

POLICY_NUMBERS = {"lru": 0, "fifo": 1, "random": 2, "two_rate": 3, "two_rate_tier": 3}  # `Policy` of rebuild_order.cu
SLOTS_PER_BLOCK = 8192  # of rebuild_order, 8 a thread
MOST_REBUILD_BLOCKS = 32  # a layer; it runs beside other work
WARP = 32
MOST_ROWS = 8192  # of an insert: its numbers stand in shared memory
REBUILD = ("count_keys", "place_slots")  # its two launches


def load_tables(device: torch.device) -> dict[str, Kernel]:
    """The kernels that move no records, by name."""
    return {
        "insert": load("insert.cu", "insert", InsertParams, device),
        "release": load("release.cu", "release", ReleaseParams, device),
        **{name: load("rebuild_order.cu", name, RebuildOrderParams, device, BINS=NUM_BINS) for name in REBUILD},
    }


def launch_insert(
    tables: list[Tensor], counters: list[Tensor], control: Tensor, rows: Tensor, slots: Tensor, by_recency: bool
) -> None:
    """`ops.insert`, checked and flattened."""
    kernel = load_tables(control.device)["insert"]
    batch = rows.numel()
    params = InsertParams(
        tables=tables_struct(SlotTables(*tables), control),
        counters=counters_struct(Counters(*counters)),
        rows=rows.data_ptr(),
        slots=slots.data_ptr(),
        batch=batch,
        by_recency=by_recency,
    )
    threads = min(max(-(-batch // WARP) * WARP, WARP), 1024)
    launch(kernel, params, (control.shape[0], 1), threads, shared_bytes=4 * batch)


def launch_release(tables: list[Tensor], control: Tensor, rows: Tensor) -> None:
    """`ops.release`, checked and flattened."""
    if not rows.numel():
        return
    kernel = load_tables(control.device)["release"]
    params = ReleaseParams(
        tables=tables_struct(SlotTables(*tables), control), rows=rows.data_ptr(), num_rows=rows.numel()
    )
    launch(kernel, params, (-(-rows.numel() // 256), control.shape[0]), 256)


def launch_rebuild_order(
    tables: list[Tensor],
    counters: list[Tensor],
    control: Tensor,
    bins: Tensor,
    heat: Tensor,
    first_layer: int,
    num_layers: int,
    policy: str,
) -> None:
    """`ops.rebuild_order`, checked and flattened."""
    views = SlotTables(*tables)
    params = RebuildOrderParams(
        tables=tables_struct(views, control),
        counters=counters_struct(Counters(*counters)),
        bins=bins.data_ptr(),
        heat=heat[0].data_ptr(),
        heat_step=heat[1].data_ptr(),
        first_layer=first_layer,
        policy=POLICY_NUMBERS[policy],
    )
    blocks = min(-(-views.stamp.shape[-1] // SLOTS_PER_BLOCK), MOST_REBUILD_BLOCKS)
    for name in REBUILD:
        launch(load_tables(control.device)[name], params, (blocks, num_layers), 1024)
