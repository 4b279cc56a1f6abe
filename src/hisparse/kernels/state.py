"""What the kernels keep on the device between launches, beside the tables of `device_pool.py`."""

from typing import NamedTuple

import torch
from torch import Tensor

CONTROL_WORDS = 32  # int32 a layer: `Control` of common.cuh, 128 bytes
STEP_WORD, INSERTED_WORD = 4, 10  # of them: the current step, and the records that `insert` was given
NUM_BINS = 12 * 1024  # of rebuild_order.cu


class LaunchState(NamedTuple):
    """One per device pool. Zero to begin with."""

    control: Tensor  # int32 [layers, 32]
    bins: Tensor  # int32 [layers, NUM_BINS], all zero between launches
    heat: Tensor  # int32 [2, layers, rows]: each row's, and the step that it is of; no rows unless a policy needs it

    @property
    def step(self) -> Tensor:
        """int32 [layers], a view: the step that each layer is in. `insert` moves it on."""
        return self.control[:, STEP_WORD]

    @property
    def inserted(self) -> Tensor:
        """int32 [layers], a view: new records since the start; wraps."""
        return self.control[:, INSERTED_WORD]


def new_launch_state(num_layers: int, device: torch.device, *, heated_rows: int = 0) -> LaunchState:
    """The state of a device pool in which nothing happened yet; a policy that is `heated` needs all rows."""

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    control, bins = zeros(num_layers, CONTROL_WORDS), zeros(num_layers, NUM_BINS)
    return LaunchState(control, bins, zeros(2, num_layers, heated_rows))


class MissPlan(NamedTuple):
    """What one resolve fetched; `replay` fetches the same into another layer."""

    rows: Tensor  # int32 [b * k]
    slots: Tensor  # int32 [b * k]; -1: that record found no slot
    num_misses: Tensor  # int32 []: how many of them are valid


def new_miss_plan(size: int, device: torch.device) -> MissPlan:
    """Room for the misses of `size` = b * k selected positions."""
    rows, slots = torch.zeros(2, size, dtype=torch.int32, device=device)
    return MissPlan(rows, slots, torch.zeros((), dtype=torch.int32, device=device))
