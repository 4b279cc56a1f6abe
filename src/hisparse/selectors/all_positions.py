"""Selects every position: turns the sparse path into dense attention, to compare with other implementations."""

from functools import partial

import torch
from torch import Tensor

from hisparse.ranking import Ranking
from hisparse.selectors.selector import Selected


class AllPositions:
    """Every position of a history of up to `top_k`; it keeps no state."""

    num_groups = 1
    can_be_recorded = False  # it looks at the lengths
    page_shape = (0,)
    dtype = torch.uint8
    state_bytes_per_token = 0.0

    def __init__(self, top_k: int) -> None:
        self.top_k = top_k

    def append(self, state: Tensor, pages: Tensor, positions: Tensor, keys: Tensor) -> None:
        """Nothing to remember."""

    def select(self, state: Tensor, page_table: Tensor, lengths: Tensor, query: Tensor) -> Selected:
        """Positions 0 to lengths - 1; int32 [b, 1, top_k]. Raises `ValueError` if a history is longer."""
        longest = int(lengths.max())
        if longest > self.top_k:
            raise ValueError(
                f"the selector 'all' reads every position, and a history has {longest} with top_k {self.top_k}: "
                f"raise top_k (and device_buffer_size) to the context length, or use the selector 'quest'"
            )
        return Selected(_up_to(lengths, self.top_k), partial(_best_of, lengths))


def _best_of(lengths: Tensor, count: int) -> Ranking:
    """None is better than another."""
    positions = _up_to(lengths, count)
    return Ranking(
        positions, torch.zeros(positions.shape, device=lengths.device).masked_fill(positions < 0, -torch.inf)
    )


def _up_to(lengths: Tensor, count: int) -> Tensor:
    """Positions 0 to lengths - 1, int32 [b, 1, count]."""
    positions = torch.arange(count, dtype=torch.int32, device=lengths.device)
    return torch.where(positions < lengths[:, None], positions, -1)[:, None]
