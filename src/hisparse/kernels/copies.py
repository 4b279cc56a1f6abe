"""Launch cuda/copy.cu: write_through, stage and replay, which move records whose places are known."""

import torch
from torch import Tensor

from hisparse.device_pool import SlotTables
from hisparse.kernels.checks import check_memory
from hisparse.kernels.launch import Kernel, launch, load
from hisparse.kernels.params import CopyParams, tables_struct

THREADS = 256
STAGE_BLOCKS = 64  # enough to fill the link; the rest of the GPU computes
REPLAY_BLOCKS = 32  # runs beside the layers' own work


def load_copy(name: str, record_bytes: int, device: torch.device) -> Kernel:
    """write_through, stage or replay, for records of a size."""
    return load("copy.cu", name, CopyParams, device, RECORD_BYTES=record_bytes)


def launch_write_through(records: Tensor, slots: Tensor, rows: Tensor, pool: Tensor, host: Tensor) -> None:
    """`ops.write_through`, checked and flattened."""
    params = CopyParams(
        records=records.data_ptr(),
        rows=rows.data_ptr(),
        slots=slots.data_ptr(),
        host=host.data_ptr(),
        pool=pool.data_ptr(),
        num_records=rows.numel(),
    )
    _launch("write_through", params, pool, _blocks(records), records, pool, host)


def launch_stage(
    tables: list[Tensor], control: Tensor, records: Tensor, rows: Tensor, pool: Tensor, host: Tensor, layer: int
) -> None:
    """`ops.stage`, checked and flattened."""
    params = CopyParams(
        tables=tables_struct(SlotTables(*tables), control),
        records=records.data_ptr(),
        rows=rows.data_ptr(),
        host=host.data_ptr(),
        pool=pool.data_ptr(),
        num_records=rows.numel(),
        layer=layer,
    )
    _launch("stage", params, pool, min(_blocks(records), STAGE_BLOCKS), records, pool, host)


def launch_replay(plan: list[Tensor], host: Tensor, pool: Tensor) -> None:
    """`ops.replay`, checked and flattened."""
    rows, slots, count = (tensor.data_ptr() for tensor in plan)
    params = CopyParams(plan_rows=rows, plan_slots=slots, plan_count=count, host=host.data_ptr(), pool=pool.data_ptr())
    _launch("replay", params, pool, REPLAY_BLOCKS, pool, host)


def _blocks(records: Tensor) -> int:
    return -(-records.shape[0] * records.shape[1] // (16 * THREADS))


def _launch(name: str, params: CopyParams, pool: Tensor, blocks: int, *memory: Tensor) -> None:
    if blocks:
        check_memory(*memory)
        launch(load_copy(name, pool.shape[-1], pool.device), params, (blocks, 1), THREADS)
