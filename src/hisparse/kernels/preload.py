"""Compile and load every kernel that a cache will launch, when it is made: a capture must not have to."""

import torch

from hisparse.kernels.copies import load_copy
from hisparse.kernels.resolve import load_resolve
from hisparse.kernels.tables import load_tables


def preload(record_bytes: int, device: torch.device, *, io: bool = True) -> None:
    """Make ready for records of a size. Raises `BuildError` if the kernels cannot be compiled or loaded."""
    load_resolve(record_bytes, device, io=io)
    for name in ("write_through", "stage", "replay"):
        load_copy(name, record_bytes, device)
    load_tables(device)
