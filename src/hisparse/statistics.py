"""What a cache did since it was made, from the counters that its backend keeps."""

from typing import NamedTuple

from torch import Tensor

from hisparse.device_pool import Counters


class Statistics(NamedTuple):
    """Totals since the start, of one layer or of all."""

    hits: int
    misses: int
    fetched_bytes: int
    order_rebuilds: int
    exhausted_orders: int

    @property
    def miss_rate(self) -> float:
        """Misses as a share of all selected positions; 0 if nothing was selected yet."""
        return self.misses / max(self.hits + self.misses, 1)


def count_up(counters: Counters, record_bytes: int, layer: int | None) -> Statistics:
    """Statistics of a layer, or of all layers together."""

    def total(counter: Tensor) -> int:
        return int(counter.sum() if layer is None else counter[layer])

    return Statistics(
        hits=total(counters.hits),
        misses=total(counters.misses),
        fetched_bytes=total(counters.misses) * record_bytes,
        order_rebuilds=total(counters.rebuilds),
        exhausted_orders=total(counters.exhausted),
    )
