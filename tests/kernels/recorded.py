"""A decode step of all layers in a CUDA graph, with static inputs, and requests whose records are known."""

import torch
from torch import Tensor

from hisparse.admission import CacheRequest
from hisparse.cache import HierarchicalCache
from hisparse.layout import CacheLayout
from hisparse.ranking import Ranking

GARBAGE = 12345


class RecordedStep:
    """One bucket's graph. After a replay, `outputs` holds what attention would have read."""

    def __init__(self, cache: HierarchicalCache, batch_size: int) -> None:
        layout = cache.layout
        shape = (layout.num_layers, batch_size)
        self.selection = torch.full((*shape, layout.top_k), GARBAGE, dtype=torch.int32, device="cuda")
        self.records = torch.zeros(*shape, layout.record_bytes, dtype=torch.uint8, device="cuda")
        self.graph = torch.cuda.CUDAGraph()
        self.slots: list[Tensor] = []
        self.outputs: list[Tensor] = []  # [b, k, record_bytes] by layer
        with torch.cuda.graph(self.graph), cache.record_step(batch_size) as self.step:
            for layer in range(layout.num_layers):
                cache.append(layer, self.records[layer])
                selects = layout.anchors[layer] == layer
                slots = cache.resolve(layer, self.selection[layer], self.best) if selects else cache.follow(layer)
                self.slots.append(slots)
                self.outputs.append(cache.records(layer)[slots.clamp(min=0)])

    def best(self, count: int) -> Ranking:
        """Anything, of the first layer: garbage past the histories, and positions of other lines."""
        positions = self.selection[0].roll(1, 0).clamp(max=count)
        return Ranking(positions, torch.zeros(positions.shape, device="cuda"))


class Requests:
    """Requests of one cache, the truth about their records, and random selections."""

    def __init__(self, cache: HierarchicalCache, seed: int) -> None:
        self.cache = cache
        self.random = torch.Generator("cuda").manual_seed(seed)
        self.truth: dict[CacheRequest, Tensor] = {}  # [layers, capacity, record_bytes]
        self.last: dict[CacheRequest, Tensor] = {}

    def new_records(self, *shape: int) -> Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda", generator=self.random)

    def admit(self, capacity: int, staged: int) -> CacheRequest:
        request = self.cache.admit(capacity)
        layout = self.cache.layout
        self.truth[request] = self.new_records(layout.num_layers, capacity, layout.record_bytes)
        for layer in range(layout.num_layers):
            self.cache.stage(layer, request, 0, self.truth[request][layer, :staged])
        return request

    def select(self, request: CacheRequest, layer: int) -> Tensor:
        """int32 [k] of the history and the newest position; pads at the end, and garbage past the history."""
        k, length = self.cache.layout.top_k, request.length + 1
        anew = torch.randperm(length, device="cuda", generator=self.random)
        last = self.last.get(request, anew[:0])
        kept = last[torch.rand(len(last), device="cuda", generator=self.random) < 0.8]
        chosen = torch.cat([kept, anew[~torch.isin(anew, kept)]])[: min(k, length)]
        if layer == self.cache.layout.num_layers - 1:
            self.last[request] = chosen
        line = torch.full((k,), -1, dtype=torch.int32, device="cuda")
        line[: len(chosen)] = chosen.int()
        line[len(chosen) :: 2] = length + 7
        return line

    def replay(self, requests: list[CacheRequest], recorded: RecordedStep) -> None:
        """One step through the graph, every selected record checked."""
        layers, live = self.cache.layout.num_layers, len(requests)
        recorded.selection.fill_(GARBAGE)
        recorded.records.copy_(self.new_records(*recorded.records.shape))
        for line, request in enumerate(requests):
            self.truth[request][:, request.length] = recorded.records[:, line]
            for layer, anchor in enumerate(self.cache.layout.anchors):
                chosen = self.select(request, layer) if layer == anchor else recorded.selection[anchor, line]
                recorded.selection[layer, line] = chosen
        with self.cache.step(requests, recorded=recorded.step):
            recorded.graph.replay()
        for layer in range(layers):
            assert (recorded.slots[layer][live:] == -1).all(), "a padded line got slots"
            for line, request in enumerate(requests):
                self.check(layer, request, recorded.selection[layer, line], recorded.outputs[layer][line])

    def check(self, layer: int, request: CacheRequest, selection: Tensor, got: Tensor) -> None:
        """`request` has grown by the step's position."""
        real = (selection >= 0) & (selection < request.length)
        assert torch.equal(got[real], self.truth[request][layer][selection[real].long()])


def new_cache(
    *, policy: str = "lru", max_requests: int = 6, num_layers: int = 19, slack: int = 1, anchors: tuple[int, ...] = (),
    prefetch: bool = True,
) -> HierarchicalCache:  # fmt: skip
    """Three launches of orders, the last one short; the tightest pool that is legal."""
    layout = CacheLayout(
        num_layers=num_layers,
        record_bytes=48,
        top_k=40,
        device_buffer_size=40 + slack,
        max_requests=max_requests,
        num_pages=6 * max_requests,
        anchors=anchors,
    )
    cache = HierarchicalCache(layout, policy=policy, device="cuda", prefetch=prefetch)
    cache.device_pool.records.fill_(0xFF)
    return cache
