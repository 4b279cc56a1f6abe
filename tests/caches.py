"""Small caches for tests, and a driver whose records say whose they are."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hisparse.admission import CacheRequest
from hisparse.cache import HierarchicalCache
from hisparse.layout import PAGE_RECORDS, CacheLayout
from hisparse.order import POLICIES
from hisparse.selection_state import SelectionState
from hisparse.step import Step

EVERY_POLICY = sorted(POLICIES)
CHURN = [[0, 1, 2, 3], [4, 5, 6, 7], [0, 8, 9, 10], [1, 2, 11, 12], [4, 0, 3, 9], [13, 2, 7, 1], [5, 6, 10, 0]]
GARBAGE = 0xFF  # a NaN in every floating-point dtype
SMALL = {
    "num_layers": 2,
    "record_bytes": 32,
    "top_k": 4,
    "device_buffer_size": 6,
    "max_requests": 2,
    "num_pages": 8,
}


def default_device() -> torch.device:
    """Where torch makes tensors now; conftest.py's `each_backend` changes it."""
    return torch.empty(0).device


def small_layout(**changes: Any) -> CacheLayout:
    """2 layers, records of 32 bytes, top_k 4, 2 requests of 6 slots each, 8 host pages; or as changed."""
    return CacheLayout(**(SMALL | changes))


def small_state(layout: CacheLayout, **changes: Any) -> SelectionState:
    """Selection state whose tables fit the layout's; 3 floats a page."""
    fitting: dict[str, Any] = {
        "num_layers": layout.num_layers,
        "num_pages": layout.num_pages,
        "page_shape": (3,),
        "dtype": torch.float32,
        "max_requests": layout.max_requests,
        "max_pages": layout.max_pages,
        "device": default_device(),
    }
    return SelectionState(**(fitting | changes))


def small_cache(
    *,
    policy: str = "lru",
    debug: bool = True,
    with_state: bool = False,
    fill: int = GARBAGE,
    options: Mapping[str, Any] | None = None,
    **changes: Any,
) -> HierarchicalCache:
    """A cache of `small_layout(**changes)` in which every byte that nobody wrote is `fill`."""
    layout = small_layout(**changes)
    state = small_state(layout) if with_state else None
    cache = HierarchicalCache(
        layout, policy=policy, debug=debug, selection_state=state, device=default_device(), **(options or {})
    )
    cache.host_pool.records.fill_(fill)
    cache.device_pool.records.fill_(fill)
    cache.workspace._tiles.fill_(fill)
    return cache


def make_records(tag: int, layer: int, start: int, count: int) -> Tensor:
    """int32 [count, 8]: each record names its writer, layer and position."""
    positions = torch.arange(start, start + count, dtype=torch.int32)
    columns = torch.zeros(count, 8, dtype=torch.int32)
    columns[:, 0], columns[:, 1], columns[:, 2], columns[:, 3] = tag, layer, positions, ~positions
    return columns


class Driver:
    """Makes a cache's calls in the order an engine does, and checks every slot that it is handed."""

    def __init__(self, cache: HierarchicalCache) -> None:
        self.cache = cache
        self.tags: dict[CacheRequest, list[int]] = {}  # who wrote each position
        self._next_tag = 1

    def admit(
        self, max_positions: int = 64, *, staged: int = 0, prefix: tuple[CacheRequest, int] | None = None
    ) -> CacheRequest:
        request = self.cache.admit(max_positions, prefix=prefix)
        self.tags[request] = self.tags[prefix[0]][: prefix[1]] if prefix else []
        if staged:
            self.stage(request, staged)
        return request

    def stage(self, request: CacheRequest, count: int) -> None:
        """Stage `count` more positions in every layer."""
        start, tag = request.length, self._tag()
        for layer in range(self.cache.layout.num_layers):
            self.cache.stage(layer, request, start, make_records(tag, layer, start, count))
        self.tags[request] += [tag] * count

    def step(self, selections: Mapping[CacheRequest, Sequence[int]]) -> list[Tensor]:
        """One step of these requests, every layer with the same selections. Returns slots [b, k] by layer."""
        requests = list(selections)
        selection = pad([selections[request] for request in requests])
        with self.cache.step(requests) as step:
            self.append(step)
            slots = [self.slots(layer, selection) for layer in range(self.cache.layout.num_layers)]
            for layer, found in enumerate(slots):  # after the last resolve: they must still hold
                self.check(layer, requests, selection, found)
        return slots

    def slots(self, layer: int, selection: Tensor) -> Tensor:
        """Resolve an anchor, follow with a shared layer."""
        selects = self.cache.layout.anchors[layer] == layer
        return self.cache.resolve(layer, selection) if selects else self.cache.follow(layer)

    def append(self, step: Step) -> None:
        """Append the step's records in every layer."""
        tag = self._tag()
        for request, position in zip(step.requests, step.positions.tolist(), strict=True):
            del self.tags[request][position:]
            self.tags[request].append(tag)
        for layer in range(self.cache.layout.num_layers):
            new = [make_records(tag, layer, position, 1) for position in step.positions.tolist()]
            self.cache.append(layer, torch.cat(new))

    def check(self, layer: int, requests: Sequence[CacheRequest], selection: Tensor, slots: Tensor) -> None:
        """The slots hold the records of the selected positions."""
        assert torch.equal(slots < 0, selection < 0)
        pool = self.cache.records(layer).view(torch.int32)
        for request, positions, places in zip(requests, selection.tolist(), slots.tolist(), strict=True):
            for position, slot in zip(positions, places, strict=True):
                if position >= 0:
                    assert torch.equal(pool[slot], self.record(request, layer, position))

    def record(self, request: CacheRequest, layer: int, position: int) -> Tensor:
        return make_records(self.tags[request][position], layer, position, 1)[0]

    def _tag(self) -> int:
        self._next_tag += 1
        return self._next_tag


def pad(selections: Sequence[Sequence[int]]) -> Tensor:
    """int32 [b, k], -1 pads, from lists of different lengths."""
    width = max(len(positions) for positions in selections)
    lines = [[*positions, *[-1] * (width - len(positions))] for positions in selections]
    return torch.tensor(lines, dtype=torch.int32).view(len(selections), width)


def row_of(request: CacheRequest, position: int) -> int:
    return request.pages[position // PAGE_RECORDS] * PAGE_RECORDS + position % PAGE_RECORDS


def resident(cache: HierarchicalCache, request: CacheRequest, layer: int = 0) -> list[int]:
    """Positions of the request that are in the device pool, ascending."""
    table = cache.device_pool.layer(layer).slot_of_row
    positions = range(len(request.pages) * PAGE_RECORDS)
    return [position for position in positions if table[row_of(request, position)] >= 0]


def host_records(cache: HierarchicalCache) -> Tensor:
    """The host pool's records, once nothing is on its way to them."""
    if cache.device.type == "cuda":
        torch.cuda.synchronize(cache.device)
    return cache.host_pool.records


def snapshot(cache: HierarchicalCache) -> dict[str, Any]:
    """Everything that a call could change, as plain comparable values."""
    pools = [cache.host_pool.pages] + ([cache.selection_state.pages] if cache.selection_state else [])
    host = host_records(cache)  # first: what is on its way to slots has arrived then, too
    return {
        "tables": {name: table.tolist() for name, table in cache.device_pool.tables._asdict().items()},
        "counters": [counter.tolist() for counter in cache.device_pool.counters],
        "slots": cache.device_pool.records.tolist(),
        "host": host.tolist(),
        "page table": cache.admission.page_table.tolist(),
        "step": cache.backend.step_number,
        "free": [list(cache.admission.free_index), *(pages._free.copy() for pages in pools)],
        "references": [pages.references.copy() for pages in pools],
        "requests": [
            (r.state, r.length, r.index, list(r.pages), list(r.state_pages), list(r.staged)) for r in cache.requests
        ],
    }


def new_driver(**changes: Any) -> Driver:
    return Driver(small_cache(**changes))
