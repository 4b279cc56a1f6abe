"""What a cache did since it was made, from the counters that its backend keeps."""

from typing import NamedTuple

from torch import Tensor

from hisparse.device_pool import Counters
from hisparse.layout import CacheLayout


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


def count_up(counters: Counters, layout: CacheLayout, layer: int | None) -> Statistics:
    """Statistics of a layer, or of all layers together."""
    layers = range(layout.num_layers) if layer is None else (layer,)

    def of_layers(counter: Tensor) -> int:
        by_group: list[int] = counter.tolist()
        return sum(by_group[layout.group_of[one]] for one in layers)

    def of_anchors(counter: Tensor) -> int:
        by_group: list[int] = counter.tolist()
        return sum(by_group[group] for group in {layout.group_of[one] for one in layers})

    misses = of_layers(counters.misses)
    return Statistics(
        hits=of_layers(counters.hits),
        misses=misses,
        fetched_bytes=misses * layout.record_bytes,
        order_rebuilds=of_anchors(counters.rebuilds),
        exhausted_orders=of_anchors(counters.exhausted),
    )
