"""A kind of model, as the engine needs it: what its records and its selection state are, and how it attends.

There are two: grouped-query attention (grouped.py) and latent attention (latent.py). A family runs the model's forward
over the hierarchical cache for the runner, and over resident records for the run that it is compared with.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hisparse.admission import CacheRequest
from hisparse.cache import HierarchicalCache
from hisparse.layout import PAGE_RECORDS
from hisparse.models import Model
from hisparse.selection_state import SelectionState
from hisparse.step import Step


@dataclass
class Resident:
    """One request's records and selection state, whole."""

    records: Tensor  # uint8 [cache layers, max_positions, record_bytes]
    state: Tensor  # [state layers, state pages, *page_shape]
    is_padding: bool = False  # a line that nobody takes: one position of zeros, no state


class Family(Protocol):
    """Runs one model's forwards. A forward returns hidden states [t, hidden]."""

    @property
    def model(self) -> Model:
        """The decoder."""

    @property
    def top_k(self) -> int:
        """Positions that a selection names at most."""

    @property
    def prefills_sparsely(self) -> bool:
        """Whether long prompts are read by selection too."""

    @property
    def record_bytes(self) -> int:
        """Bytes of one record of one cache layer."""

    @property
    def anchors(self) -> tuple[int, ...]:
        """Of the cache's layers: see `CacheLayout.anchors`."""

    @property
    def num_state_layers(self) -> int:
        """Layers that keep selection state."""

    @property
    def page_shape(self) -> tuple[int, ...]:
        """Of a page of that state."""

    @property
    def state_dtype(self) -> torch.dtype:
        """Of that state."""

    @property
    def can_be_recorded(self) -> bool:
        """Whether `forward_step` can be recorded in a CUDA graph: on a GPU, nothing in it waits for the device."""

    @property
    def failures(self) -> Tensor | None:
        """Selections since the last check that met scores that are not finite, int32 []; None: they raise at once."""

    def check_selections(self, num_failures: int | None = None) -> None:
        """Raise `ModelOutputError` if there were `failures`; unless it is told how many, it waits for the device."""

    def forward_chunk(
        self, cache: HierarchicalCache, request: CacheRequest, tokens: Tensor, positions: Tensor, *, seeds: int
    ) -> Tensor:
        """A piece of one request's prompt, int64 [n] tokens and positions: stages records, reads the history.

        The device gets so many `seeds`, what the last query ranks highest (`HierarchicalCache.seed`).
        """

    def forward_step(self, cache: HierarchicalCache, step: Step, tokens: Tensor) -> Tensor:
        """One token, int64 [b], of each request of a step."""

    def forward_resident_chunk(self, resident: Resident, tokens: Tensor, positions: Tensor) -> Tensor:
        """As `forward_chunk`, on resident records."""

    def forward_resident_step(self, residents: Sequence[Resident], tokens: Tensor, positions: Tensor) -> Tensor:
        """As `forward_step`, on resident records; `positions` int64 [b]."""


def state_of(cache: HierarchicalCache) -> SelectionState:
    """The cache's selection state. Raises `ValueError` for a cache that was made without."""
    if cache.selection_state is None:
        raise ValueError("the engine needs a cache with a selection state")
    return cache.selection_state


def pages_of_step(state: SelectionState, step: Step) -> tuple[Tensor, Tensor]:
    """Where a step's requests keep their selection state.

    Returns:
        [b, p] pages of each request, and int64 [b] the page of its newest position; a padded line's is scratch.
    """
    table = state.page_table[step.request_index]  # line -1 of a padded request is any line: it has no positions
    newest = table.gather(1, (step.positions // PAGE_RECORDS)[:, None])[:, 0].long()
    return table, newest.masked_fill(step.request_index < 0, state.scratch_page)


def lengths_of(residents: Sequence[Resident], positions: Tensor) -> Tensor:
    """Positions in each history, the newest one included, int64 [b]; 0 for padding, as in a `Step`."""
    padding = torch.tensor([resident.is_padding for resident in residents], device=positions.device)
    return (positions + 1).masked_fill(padding, 0)


def side_by_side(states: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Several requests' states [pages, ...] as one, and their page tables [b, p], -1 past a request's last."""
    widths = [len(state) for state in states]
    table = torch.full((len(states), max(widths)), -1, dtype=torch.int32, device=states[0].device)
    for i, width in enumerate(widths):
        table[i, :width] = torch.arange(width) + sum(widths[:i])
    return torch.cat(list(states)), table


def end_to_end(stores: Sequence[Tensor], selection: Tensor) -> tuple[Tensor, Tensor]:
    """The selected records of each request laid end to end, in selection order, and their places as slots.

    Args:
        stores: a request's records each, uint8 [positions, record_bytes].
        selection: int [b, k], -1 pads.

    Returns:
        uint8 [b * k, record_bytes] and int32 [b, k], -1 pads.
    """
    chosen = torch.cat([store[row.clamp(min=0).long()] for store, row in zip(stores, selection, strict=True)])
    places = torch.arange(chosen.shape[0], dtype=torch.int32, device=chosen.device).view(selection.shape)
    return chosen, places.masked_fill(selection < 0, -1)
