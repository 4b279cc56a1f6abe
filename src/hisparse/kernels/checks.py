"""What the operations' arguments must be, checked once: shapes in ops.py, memory where a kernel is launched.

Shapes, dtypes and devices are known while a graph is traced with fake tensors; addresses are not.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hisparse.device_pool import SlotTables
from hisparse.kernels.state import MissPlan
from hisparse.layout import RECORD_ALIGNMENT

WARP = 32
MOST_THREADS = 1024
MOST_LINES = 65535  # of a grid, along y


def check_tensor(
    tensor: Tensor, name: str, dtype: torch.dtype, beside: Tensor, dimensions: int, *, last_stride_only: bool = False
) -> None:
    """Raise `ValueError` unless `tensor` is as said, contiguous, and on the device of `beside`."""
    if tensor.dtype != dtype or tensor.dim() != dimensions:
        raise ValueError(
            f"{name} must be {dtype} with {dimensions} dimensions, got {tensor.dtype} {list(tensor.shape)}"
        )
    if tensor.device != beside.device:
        raise ValueError(f"{name} must be on {beside.device}, like the rest, got {tensor.device}")
    dense = tensor.shape[-1] < 2 or tensor.stride(-1) == 1 if last_stride_only else tensor.is_contiguous()
    if not dense:
        raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}: call .contiguous()")


def check_requests(lines: int) -> None:
    """Raise `ValueError` if one launch cannot have so many lines of requests."""
    if lines > MOST_LINES:
        raise ValueError(f"one launch takes at most {MOST_LINES} requests, got {lines}: split the batch")


def check_length(tensor: Tensor, name: str, length: int) -> None:
    """Raise `ValueError` unless the first dimension is `length`."""
    if tensor.shape[0] != length:
        raise ValueError(f"{name} must have {length} lines, got {tensor.shape[0]}")


def check_records(host: Tensor, pool: Tensor, records: Tensor | None = None) -> None:
    """Raise `ValueError` unless all are uint8 lines of one record each, contiguous."""
    check_tensor(pool, "pool", torch.uint8, pool, 2)
    record_bytes = pool.shape[1]
    if record_bytes % RECORD_ALIGNMENT:
        raise ValueError(f"record_bytes must be a multiple of {RECORD_ALIGNMENT}, got {record_bytes}")
    for name, tensor in (("host", host), ("records", pool if records is None else records)):
        if tensor.dtype != torch.uint8 or tensor.dim() != 2 or tensor.shape[1] != record_bytes:
            raise ValueError(
                f"{name} must be uint8 [n, {record_bytes}] like the slots, got {tensor.dtype} {list(tensor.shape)}"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}: call .contiguous()")


def check_memory(*tensors: Tensor) -> None:
    """Raise `ValueError` unless the GPU can read and write them in 16-byte pieces."""
    for tensor in tensors:
        if tensor.data_ptr() % RECORD_ALIGNMENT:
            raise ValueError(f"records must begin at a multiple of {RECORD_ALIGNMENT} bytes")
        if tensor.device.type == "cpu" and not tensor.is_pinned():
            raise ValueError("host must be pinned memory: the GPU reads it")


def check_pools(tables: SlotTables, layer: int, host: Tensor, pool: Tensor) -> None:
    """Raise `ValueError` unless the tables have that layer and number the rows and slots of these pools."""
    num_layers, num_rows = tables.slot_of_row.shape
    if not 0 <= layer < num_layers:
        raise ValueError(f"layer must be 0 to {num_layers - 1}, got {layer}")
    if host.shape[0] < num_rows:
        raise ValueError(f"host must have the {num_rows} rows that the tables number, got {host.shape[0]}")
    if pool.shape[0] != tables.stamp.shape[1]:
        raise ValueError(f"pool must have the {tables.stamp.shape[1]} slots of the tables, got {pool.shape[0]}")


def check_plan(plan: MissPlan, pool: Tensor, size: int) -> None:
    """Raise `ValueError` unless the plan has room for `size` misses."""
    for name, tensor in (("plan.rows", plan.rows), ("plan.slots", plan.slots)):
        check_tensor(tensor, name, torch.int32, pool, 1)
        if tensor.shape[0] < size:
            raise ValueError(f"{name} must have room for {size} misses, got {tensor.shape[0]}")
    check_tensor(plan.num_misses, "plan.num_misses", torch.int32, pool, 0)


def check_shape(shape: Sequence[int]) -> None:
    """Raise `ValueError` unless these are blocks, threads and copying threads that a launch can have."""
    blocks, threads, copiers = shape
    if blocks < 1 or threads % WARP or copiers % WARP or not WARP <= copiers <= threads <= MOST_THREADS:
        raise ValueError(
            f"shape must be blocks, threads and copying threads: whole warps of {WARP}, copying threads at most "
            f"threads, threads at most {MOST_THREADS}, got {tuple(shape)}"
        )
