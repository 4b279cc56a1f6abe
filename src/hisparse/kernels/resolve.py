"""Launch cuda/resolve.cu: how many blocks and threads a selection gets, and what the kernel is compiled for."""

from typing import NamedTuple

import torch
from torch import Tensor

from hisparse.device_pool import Counters, SlotTables
from hisparse.kernels.checks import check_memory
from hisparse.kernels.launch import Kernel, LaunchError, launch, load, max_resident_blocks
from hisparse.kernels.params import ResolveParams, counters_struct, tables_struct

WARP = 32
MISS_LIMIT = 2**24  # misses of a launch are counted in 24 bits
SHARED_BYTES_PER_SELECTION = 8  # resolve.cu's lists
IN_FLIGHT = 4  # 16-byte loads that a thread keeps in flight


class Shape(NamedTuple):
    """How a resolve is spread over the GPU."""

    blocks: int
    threads: int  # of a block
    copiers: int  # threads of a block that copy


def choose_shape(size: int, multiprocessors: int) -> Shape:
    """The shape for `size` = b * k selected positions. From the measurements in bench/results and LOG.md."""
    runs = -(-size // WARP)
    if runs <= multiprocessors:
        return Shape(runs, 256, 256)
    if size <= multiprocessors * 512:
        return Shape(multiprocessors, 512, 512)
    # Few multiprocessors, each busy with one part of the host pool, miss fewer address translations.
    return Shape(max(multiprocessors // 2, 1), 1024, 1024)


def fit_shape(kernel: Kernel, shape: Shape, size: int) -> tuple[Shape, int]:
    """The shape with no more blocks than can be resident at once, and the selections that a block may look at.

    Raises:
        LaunchError: the GPU cannot hold the lists of so many selections at once.
    """
    runs = -(-size // WARP)
    for wanted in (shape.blocks, kernel.multiprocessors):  # more blocks, each with shorter lists, if it must be
        blocks = max(1, min(wanted, runs))
        while blocks and _list_bytes(runs, blocks) <= kernel.shared_limit:
            resident = max_resident_blocks(kernel, shape.threads, _list_bytes(runs, blocks))
            if blocks <= resident:
                return shape._replace(blocks=blocks), _capacity(runs, blocks)
            blocks = resident
    raise LaunchError(f"{size} selected positions are too many for this GPU: lower top_k or the batch size")


def _capacity(runs: int, blocks: int) -> int:
    return max(-(-runs // blocks), 1) * WARP


def _list_bytes(runs: int, blocks: int) -> int:
    return _capacity(runs, blocks) * SHARED_BYTES_PER_SELECTION


def load_resolve(record_bytes: int, device: torch.device, *, io: bool = True) -> Kernel:
    """The kernel for records of a size."""
    defines = {"RECORD_BYTES": record_bytes, "IO": int(io), "IN_FLIGHT": IN_FLIGHT}
    return load("resolve.cu", "resolve", ResolveParams, device, **defines)


def launch_resolve(
    tables: list[Tensor],
    counters: list[Tensor],
    control: Tensor,
    selection: Tensor,
    request_index: Tensor,
    lengths: Tensor | None,
    page_table: Tensor,
    host: Tensor,
    pool: Tensor,
    slots: Tensor,
    plan: list[Tensor],
    layer: int,
    by_recency: bool,
    begins_step: bool,
    io: bool,
    shape: list[int],
) -> None:
    """`ops.resolve`, checked and flattened."""
    batch, k = selection.shape
    if not batch * k and not plan and not begins_step:
        return
    check_memory(host, pool)
    kernel = load_resolve(pool.shape[-1], selection.device, io=io)
    chosen = Shape(*shape) if shape else choose_shape(batch * k, kernel.multiprocessors)
    chosen, capacity = fit_shape(kernel, chosen, batch * k)
    params = ResolveParams(
        tables=tables_struct(SlotTables(*tables), control),
        counters=counters_struct(Counters(*counters)),
        selection=selection.data_ptr(),
        request_index=request_index.data_ptr(),
        lengths=None if lengths is None else lengths.data_ptr(),
        page_table=page_table.data_ptr(),
        host=host.data_ptr(),
        pool=pool.data_ptr(),
        slots=slots.data_ptr(),
        selection_stride=selection.stride(0),
        layer=layer,
        batch=batch,
        k=k,
        max_requests=page_table.shape[0],
        max_pages=page_table.shape[1],
        by_recency=by_recency,
        begins_step=begins_step,
        capacity=capacity,
        copiers=chosen.copiers,
    )
    if plan:
        params.plan_rows, params.plan_slots, params.plan_count = (tensor.data_ptr() for tensor in plan)
    launch(
        kernel, params, (chosen.blocks, 1), chosen.threads,
        shared_bytes=capacity * SHARED_BYTES_PER_SELECTION, cooperative=True, overlaps=True,
    )  # fmt: skip


def check_size(size: int) -> None:
    """Raise `ValueError` if one launch cannot count the misses of `size` selected positions."""
    if size >= MISS_LIMIT:
        raise ValueError(f"one resolve takes fewer than {MISS_LIMIT} selected positions, got {size}: split the batch")


def empty_slots(selection: Tensor) -> Tensor:
    """Where resolve puts its answer: int32 [b, k], contiguous."""
    return torch.empty(selection.shape, dtype=torch.int32, device=selection.device)
