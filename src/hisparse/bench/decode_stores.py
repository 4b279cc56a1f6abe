"""What holds the records of a decode bench: one tensor on the device, or the cache."""

from collections.abc import Callable

import torch
from torch import Tensor

from hisparse.admission import CacheRequest
from hisparse.bench.decode_layers import Layers, noise, packing
from hisparse.bench.decode_setup import DecodeSetup
from hisparse.bench.timing import replay_us
from hisparse.cache import HierarchicalCache
from hisparse.layout import PAGE_RECORDS
from hisparse.ranking import Best
from hisparse.step import Step

PACKED_AT_ONCE = 1 << 18  # records


class Resident:
    """All records on the device, a request's positions in a row: what the hierarchy is compared with."""

    def __init__(self, setup: DecodeSetup) -> None:
        self.context, self.each = setup.context, setup.pages_each * PAGE_RECORDS
        shape = (setup.num_layers, setup.batch * self.each, setup.record_bytes)
        self._records = torch.empty(shape, dtype=torch.uint8, device="cuda")
        for part in self._records.flatten(0, 1).split(PACKED_AT_ONCE):
            part.copy_(packing(setup).pack(noise(len(part), 576)))
        self._starts = torch.arange(setup.batch, device="cuda") * self.each
        self._lengths = torch.full((setup.batch,), setup.context, device="cuda")
        self._graph: torch.cuda.CUDAGraph

    def append(self, layer: int, records: Tensor) -> None:
        """See `Store`."""
        self._records[layer].index_copy_(0, self._starts + self._lengths - 1, records)

    def slots(self, layer: int, selection: Tensor, best: Best | None = None) -> Tensor:
        """See `Store`."""
        return selection + self._starts[:, None].int()

    def records(self, layer: int) -> Tensor:
        """See `Store`."""
        return self._records[layer]

    def prompt(self, layer: int, request: int) -> Tensor:
        """The records of a request before the first step."""
        return self._records[layer, request * self.each : request * self.each + self.context]

    def capture(self, layers: Layers) -> None:
        """Record the step, from the context on. It is run once before, so that everything is compiled and loaded."""
        self._graph = torch.cuda.CUDAGraph()
        self._lengths.fill_(self.context + 1)
        layers.run(self, self._lengths)
        with torch.cuda.graph(self._graph):
            layers.run(self, self._lengths)
        self._lengths -= 1

    def begin_counting(self) -> None:
        """Nothing is counted."""

    def step(self, select: Callable[[], None]) -> float:
        """One step after `select`; microseconds."""
        self._lengths += 1
        return replay_us(self._graph, torch.cuda.current_stream(), select)


class Hierarchy:
    """The cache, with each request's context on the host; `early`: see `Layers.run`."""

    def __init__(
        self, setup: DecodeSetup, cache: HierarchicalCache, resident: Resident, *, early: bool = False
    ) -> None:
        self.cache, self._early = cache, early
        self._requests: list[CacheRequest] = [cache.admit(setup.positions) for _ in range(setup.batch)]
        for number, request in enumerate(self._requests):
            for layer in range(setup.num_layers):
                cache.stage(layer, request, 0, resident.prompt(layer, number))
        self._graph = torch.cuda.CUDAGraph()
        self._recorded: Step
        self._earlier_misses = 0

    def append(self, layer: int, records: Tensor) -> None:
        """See `Store`."""
        self.cache.append(layer, records)

    def slots(self, layer: int, selection: Tensor, best: Best | None = None) -> Tensor:
        """See `Store`."""
        if self.cache.layout.anchors[layer] == layer:
            return self.cache.resolve(layer, selection, best)
        return self.cache.follow(layer)

    def records(self, layer: int) -> Tensor:
        """See `Store`."""
        return self.cache.records(layer)

    def capture(self, layers: Layers) -> None:
        """Record the step."""
        with torch.cuda.graph(self._graph), self.cache.record_step(len(self._requests)) as step:
            layers.run(self, step.lengths, early=self._early)
        self._recorded = step

    def begin_counting(self) -> None:
        """The steps from here on count."""
        self._earlier_misses = self.cache.statistics().misses

    @property
    def misses(self) -> int:
        """Of all layers in the steps that count."""
        return self.cache.statistics().misses - self._earlier_misses

    def step(self, select: Callable[[], None]) -> float:
        """One step after `select`; microseconds."""
        with self.cache.step(self._requests, recorded=self._recorded):
            return replay_us(self._graph, torch.cuda.current_stream(), select)

    def retire(self) -> None:
        """Give the host pool back."""
        for request in self._requests:
            self.cache.retire(request)
