"""Turns FP8 block-scaled weights into plain ones while a checkpoint is loaded.

DeepSeek and GLM publish FP8 checkpoints: matrices in e4m3, and beside each one its float32 scales, one for
every block of rows and columns (128 x 128). A value is the stored number times its block's scale. `loaded.py`
calls `dequantise` after reading, so that everything behind it sees ordinary tensors. The block size is the
configuration's; which tensors are FP8 is the files', because norms, routers and more are never quantised.
"""

import math
from pathlib import Path

import torch
from torch import Tensor

from hisparse.errors import CheckpointError

STORED = torch.float8_e4m3fn
OTHER_FP8 = (torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
SCALE_SUFFIX = "_scale_inv"  # "inv": it multiplies the stored number


def dequantise(
    tensors: dict[str, Tensor],  # changed in place: FP8 ones replaced, their scales removed
    block: tuple[int, int] | None,  # rows and columns that share a scale, from quantization_config
    dtype: torch.dtype,
    path: Path,
) -> None:
    """Make every FP8 tensor one of `dtype`; products are rounded once, from float32.

    Raises `CheckpointError` that names the tensor for FP8 without scales, for scales of another shape or dtype or
    that are negative or not finite, for another kind of FP8, and for FP8 where the configuration has no
    quantization_config.
    """
    for name in [name for name, tensor in tensors.items() if tensor.dtype in OTHER_FP8]:
        raise CheckpointError(f"{path}: {name} is {tensors[name].dtype}; FP8 weights must be {STORED}")
    for name in [name for name, tensor in tensors.items() if tensor.dtype == STORED]:
        if block is None:
            raise CheckpointError(
                f"{path}: {name} is FP8, but config.json has no quantization_config with its weight_block_size"
            )
        scales = tensors.pop(name + SCALE_SUFFIX, None)
        if scales is None:
            raise CheckpointError(
                f"{path}: {name} is FP8, but its scales {name + SCALE_SUFFIX} are missing; "
                "the checkpoint is incomplete: download it again"
            )
        tensors[name] = _scaled(tensors[name], scales, block, f"{path}: {name}").to(dtype)


def quantise(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The FP8 numbers [..., rows, columns] and float32 scales [..., row blocks, column blocks] of a weight.

    Each block's largest magnitude becomes the largest FP8 number. Tiny checkpoints and tests are made with it.
    """
    row_block = torch.arange(weight.shape[-2]) // block[0]
    column_block = torch.arange(weight.shape[-1]) // block[1]
    largest = torch.stack([weight[..., row_block == i, :].abs().amax(-2) for i in range(int(row_block[-1]) + 1)], -2)
    largest = torch.stack([largest[..., column_block == i].amax(-1) for i in range(int(column_block[-1]) + 1)], -1)
    scales = (largest / torch.finfo(STORED).max).clamp(min=torch.finfo(torch.float32).tiny)
    stored = weight / scales[..., row_block[:, None], column_block]
    return stored.to(STORED), scales


def _scaled(stored: Tensor, scales: Tensor, block: tuple[int, int], what: str) -> Tensor:
    if stored.dim() < 2:
        raise CheckpointError(f"{what} is FP8 of shape {list(stored.shape)}; only matrices can be block-scaled")
    rows, columns = stored.shape[-2:]
    expected = (*stored.shape[:-2], math.ceil(rows / block[0]), math.ceil(columns / block[1]))
    if tuple(scales.shape) != expected:
        raise CheckpointError(
            f"{what} has scales of shape {list(scales.shape)}, expected {list(expected)} "
            f"for {list(stored.shape)} in blocks of {block[0]} x {block[1]}"
        )
    _check_scales(scales, f"{what}{SCALE_SUFFIX}")
    each_column = scales.float().repeat_interleave(min(block[1], columns), dim=-1)[..., :columns]
    value = stored.float()
    for first, of_rows in zip(range(0, rows, block[0]), each_column.unbind(-2), strict=True):
        value[..., first : first + block[0], :] *= of_rows[..., None, :]
    return value


def _check_scales(scales: Tensor, what: str) -> None:
    if scales.dtype not in SCALE_DTYPES:
        raise CheckpointError(
            f"{what} is {scales.dtype}; scales must be one of {', '.join(str(dtype) for dtype in SCALE_DTYPES)}"
        )
    values = scales.float()
    wrong = values[~(values.isfinite() & (values >= 0))]  # 0: a block of zeros
    if wrong.numel():
        raise CheckpointError(
            f"{what} must be finite and not negative, got {float(wrong[0])} ({wrong.numel()} such of "
            f"{values.numel()}); the checkpoint is damaged: download it again"
        )
