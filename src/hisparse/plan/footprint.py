"""What the cache allocates for requests of one length: the engine's sizes, from the layout that it would make."""

from typing import NamedTuple

from hisparse.engine.family import Family
from hisparse.engine.sizes import layout_for, state_bytes
from hisparse.layout import PAGE_RECORDS, CacheLayout, num_pages_for


class Footprint(NamedTuple):
    """The bytes of one cache, on one GPU and the part of the host's memory that belongs to it."""

    layout: CacheLayout
    selection_state_bytes: int
    heat_bytes: int  # of a policy that ranks by heat; 0 with others

    @property
    def bookkeeping_bytes(self) -> int:
        """Tables, the rows' heat, and what the kernels keep between launches."""
        return self.layout.table_bytes + self.heat_bytes + self.layout.launch_bytes

    @property
    def device_bytes(self) -> int:
        """All that the cache takes of a GPU's memory."""
        return self.layout.device_kv_bytes + self.bookkeeping_bytes + self.selection_state_bytes

    @property
    def host_bytes(self) -> int:
        """All that it takes of the host's."""
        return self.layout.host_bytes


class PerToken(NamedTuple):
    """Bytes that a position takes in all layers."""

    records: float  # on the host; and on the device in a resident cache
    selection_state: float  # on the device
    tables: float  # on the device, beside the page tables; with the heat of its row, if the policy ranks by it


def footprint(
    family: Family, context: int, num_requests: int, device_buffer_size: int, *, heated: bool = False
) -> Footprint:
    """The cache that the engine makes for `num_requests` requests of `context` positions at once.

    `heated` says that its policy ranks by heat. Raises `ValueError` for sizes that a layout cannot have.
    """
    return _sized(family, num_requests, device_buffer_size, num_requests * num_pages_for(context), context, heated)


def per_token(family: Family, *, heated: bool = False) -> PerToken:
    """What one more page of history takes, shared out to its positions."""
    small, large = (_sized(family, 1, family.top_k + 1, num_pages, PAGE_RECORDS, heated) for num_pages in (1, 2))
    return PerToken(
        records=(large.host_bytes - small.host_bytes) / PAGE_RECORDS,
        selection_state=(large.selection_state_bytes - small.selection_state_bytes) / PAGE_RECORDS,
        tables=(large.bookkeeping_bytes - small.bookkeeping_bytes) / PAGE_RECORDS,
    )


def resident_bytes(family: Family, context: int) -> int:
    """Device bytes of a request whose records are all on the device, with its pages of selection state."""
    of_state = per_token(family).selection_state * num_pages_for(context) * PAGE_RECORDS
    return footprint(family, context, 1, family.top_k + 1).layout.full_kv_bytes(context) + int(of_state)


def _sized(
    family: Family, num_requests: int, buffer: int, num_pages: int, max_positions: int, heated: bool
) -> Footprint:
    layout = layout_for(
        family,
        device_buffer_size=buffer,
        max_requests=num_requests,
        num_pages=num_pages,
        max_positions=max_positions,
    )
    return Footprint(layout, state_bytes(family, layout), layout.heat_bytes if heated else 0)
