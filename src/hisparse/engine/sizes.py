"""The sizes of an engine's cache: a layout and a selection state, from what a family says of its records and its state.

build.py allocates by them; `hisparse plan` adds the same sizes up, and allocates nothing.
"""

import math

import torch

from hisparse.engine.family import Family
from hisparse.layout import CacheLayout
from hisparse.selection_state import SelectionState


def layout_for(
    family: Family, *, device_buffer_size: int, max_requests: int, num_pages: int, max_positions: int
) -> CacheLayout:
    """The layout of this family's cache; see `CacheLayout` for the sizes.

    Raises `ValueError` for sizes that a layout cannot have.
    """
    return CacheLayout(
        num_layers=len(family.anchors),
        record_bytes=family.record_bytes,
        top_k=family.top_k,
        device_buffer_size=device_buffer_size,
        max_requests=max_requests,
        num_pages=num_pages,
        max_positions=max_positions,
        anchors=family.anchors,
    )


def state_for(family: Family, layout: CacheLayout, device: torch.device) -> SelectionState:
    """The family's selection state, with a page for each of the host pool's."""
    return SelectionState(
        num_layers=family.num_state_layers,
        num_pages=layout.num_pages,
        page_shape=family.page_shape,
        dtype=family.state_dtype,
        max_requests=layout.max_requests,
        max_pages=layout.max_pages,
        device=device,
    )


def state_bytes(family: Family, layout: CacheLayout) -> int:
    """Device bytes of what `state_for` makes, its page table included."""
    page_bytes = math.prod(family.page_shape) * family.state_dtype.itemsize
    return layout.selection_state_bytes(family.num_state_layers, page_bytes)
