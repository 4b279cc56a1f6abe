"""The most requests of one length that fit, and what stops one more."""

from collections.abc import Callable
from typing import NamedTuple

from hisparse.engine.family import Family
from hisparse.layout import INT32_LIMIT, PAGE_RECORDS, num_pages_for
from hisparse.plan.footprint import Footprint, footprint


class Capacity(NamedTuple):
    """Requests that one GPU's cache can hold at once."""

    requests: int
    by_device: int  # as far as the device's memory goes
    by_host: int  # as far as the host's memory goes
    limited_by: str  # "slots", "selection_state", "tables", "host_memory" or "int32_rows"


def capacity(
    family: Family,
    context: int,
    device_buffer_size: int,
    device_bytes: int,
    host_bytes: int,
    *,
    heated: bool = False,
) -> Capacity:
    """How many requests of `context` positions with this reservation fit these bytes; `heated` as of `footprint`."""

    def size(num_requests: int) -> Footprint:
        return footprint(family, context, num_requests, device_buffer_size, heated=heated)

    most = INT32_LIMIT // max(num_pages_for(context) * PAGE_RECORDS, device_buffer_size)
    by_device = largest(lambda n: size(n).device_bytes <= device_bytes, most)
    by_host = largest(lambda n: size(n).host_bytes <= host_bytes, most)
    requests = min(by_device, by_host)
    if requests == most:
        return Capacity(requests, by_device, by_host, "int32_rows")
    limit = "host_memory" if by_host < by_device else _largest_part(size(requests + 1))
    return Capacity(requests, by_device, by_host, limit)


def largest(holds: Callable[[int], bool], most: int) -> int:
    """The largest number from 1 to `most` for which it holds, by bisection; 0 if there is none.

    What holds for a number must hold for every smaller one.
    """
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _largest_part(size: Footprint) -> str:
    """What takes the most of the device's memory."""
    parts = {
        "slots": size.layout.slots_bytes,
        "selection_state": size.selection_state_bytes,
        "tables": size.bookkeeping_bytes,
    }
    return max(parts, key=lambda part: parts[part])
