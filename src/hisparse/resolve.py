"""Check records and selections once, at the public boundary; the backend behind it assumes what is checked here."""

import math

import torch
from torch import Tensor

from hisparse.layout import CacheLayout


def check_selection(selection: Tensor, layout: CacheLayout, batch: int, device: torch.device) -> None:
    """Raise `ValueError` unless `selection` is int32 [batch, k], k <= top_k, on the cache's device."""
    if selection.dtype != torch.int32:
        raise ValueError(f"selection must be int32, got {selection.dtype}: convert it with .int()")
    if selection.dim() != 2 or selection.shape[0] != batch:
        raise ValueError(
            f"selection must have shape [{batch}, k], one row a request of the step, got {list(selection.shape)}"
        )
    if selection.shape[1] > layout.top_k:
        raise ValueError(
            f"a selection names at most top_k = {layout.top_k} positions a request, got {selection.shape[1]}: "
            f"build the cache with a larger top_k and device_buffer_size"
        )
    if selection.device != device:
        raise ValueError(f"selection must be on {device}, where the slots are, got {selection.device}")


def check_seeds(positions: Tensor, layout: CacheLayout, device: torch.device) -> None:
    """Raise `ValueError` unless `positions` is int32 [m], m <= device_buffer_size, on the cache's device."""
    most = layout.device_buffer_size
    if not isinstance(positions, Tensor):
        raise ValueError(f"seeds must be int32 [m] on {device}, got a {type(positions).__name__}")
    if positions.dtype != torch.int32 or positions.dim() != 1 or len(positions) > most or positions.device != device:
        raise ValueError(
            f"seeds must be int32 [m] on {device} with m at most device_buffer_size = {most}, "
            f"got {positions.dtype} {list(positions.shape)} on {positions.device}"
        )


def check_positions(selection: Tensor, lengths: Tensor, name: str = "selection") -> None:
    """Raise `ValueError` unless every row's positions are distinct and inside its request's history.

    Reads back from the device, so only debug mode calls it.

    Args:
        selection: int32 [b, k], -1 pads.
        lengths: int [b], positions in each request's history, the newest included.
        name: what the caller knows them by.
    """
    outside = (selection >= lengths[:, None]) | (selection < -1)
    if outside.any():
        request, column = (int(i) for i in outside.nonzero()[0])
        raise ValueError(
            f"{name}[{request}, {column}] is {int(selection[request, column])}, "
            f"but that request's history has {int(lengths[request])} positions"
        )
    ordered = selection.sort(dim=1).values
    repeated = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if repeated.any():
        request, column = (int(i) for i in repeated.nonzero()[0])
        raise ValueError(f"{name}[{request}] names position {int(ordered[request, column])} twice")


def as_bytes(records: Tensor, layout: CacheLayout, device: torch.device) -> Tensor:
    """The records as uint8 [n, record_bytes], whatever their shape and dtype.

    Raises:
        ValueError: another size, or another device than the cache's.
    """
    if records.device != device:
        raise ValueError(f"records must be on {device}, where the slots are, got {records.device}")
    raw = records.contiguous().view(records.shape[0], math.prod(records.shape[1:])).view(torch.uint8)
    if raw.shape[1] != layout.record_bytes:
        raise ValueError(
            f"a record has {layout.record_bytes} bytes in this cache, got {raw.shape[1]} "
            f"from {records.dtype} {list(records.shape)}"
        )
    return raw
