"""The layers of a decode bench: the indexer, attention, and a product that stands for everything else.

`Layers.run` is one step, whatever holds the records: it asks a `Store` for slots and reads what stands there.
"""

from contextlib import nullcontext
from typing import Protocol

import torch
from torch import Tensor

from hisparse.attention import LatentRecords, attend_latent
from hisparse.bench.decode_setup import DecodeSetup
from hisparse.bench.timing import call_us
from hisparse.kernels.side_stream import SideStream
from hisparse.layout import PAGE_RECORDS
from hisparse.ranking import Best, Ranking
from hisparse.selectors import DSA

HIDDEN = 6144
CALIBRATION_COLUMNS = 16384
CLOSE_ENOUGH = 0.02
CALIBRATIONS = 6


class Store(Protocol):
    """Holds records: a cache, or one tensor of all."""

    def append(self, layer: int, records: Tensor) -> None:
        """Take in the step's new records, uint8 [b, record_bytes]."""

    def slots(self, layer: int, selection: Tensor, best: Best | None = None) -> Tensor:
        """Where a selection's records are, int32 [b, k]. An anchor says what its indexer ranks best."""

    def records(self, layer: int) -> Tensor:
        """uint8 [N, record_bytes]."""


class OtherWork:
    """A product of the batch's hidden states with a matrix that is larger than any cache, of a given time."""

    def __init__(self, batch: int, us: float) -> None:
        self.hidden = torch.randn(batch, HIDDEN, device="cuda", dtype=torch.bfloat16)
        probe = torch.randn(HIDDEN, CALIBRATION_COLUMNS, device="cuda", dtype=torch.bfloat16)
        columns = max(int(CALIBRATION_COLUMNS * us / _product_us(self.hidden, probe)) // 64, 1) * 64
        for _ in range(CALIBRATIONS):  # what a column costs depends a little on how many there are
            self.weights = torch.randn(HIDDEN, columns, device="cuda", dtype=torch.bfloat16)
            self.us = _product_us(self.hidden, self.weights)
            if abs(self.us / us - 1) < CLOSE_ENOUGH:
                break
            columns = max(int(columns * us / self.us) // 64, 1) * 64

    def __call__(self, share: float) -> None:
        """Do a share of it."""
        columns = int(self.weights.shape[1] * share) // 64 * 64
        if columns:
            torch.mm(self.hidden, self.weights[:, :columns])


class Layers:
    """One step of a slice, over any store."""

    def __init__(self, setup: DecodeSetup) -> None:
        shape, batch, pages = setup.slice, setup.batch, setup.pages_each
        self.layout, self.packing = setup.layout(), packing(setup)
        self.scale = 576**-0.5
        self.selector = DSA(top_k=shape.top_k, head_dim=shape.index_head_dim)
        groups = len(self.layout.groups)
        self.keys = noise(groups, batch * pages, PAGE_RECORDS, shape.index_head_dim)
        self.table = torch.arange(batch * pages, dtype=torch.int32, device="cuda").view(batch, -1)
        self.index_query = noise(groups, batch, shape.index_heads, shape.index_head_dim)
        self.index_weights = noise(groups, batch, shape.index_heads).float()
        self.query = noise(setup.num_layers, batch, shape.num_heads, 576)
        self.new = torch.stack([self.packing.pack(noise(batch, 576)) for _ in range(setup.num_layers)])
        self.out = torch.zeros(setup.num_layers, batch, shape.num_heads, 512, dtype=torch.bfloat16, device="cuda")
        self.other = OtherWork(batch, setup.other_us)
        self._side = SideStream(torch.device("cuda"))
        self.early = setup.early_us / setup.other_us
        self.selection = torch.zeros(batch, shape.top_k, dtype=torch.int32, device="cuda")  # of the step; all anchors'

    def select(self, positions: Tensor, newest: int) -> None:
        """What the next step selects: int32 [b, k - 1] positions, ascending, and the newest one."""
        self.selection[:, :-1] = positions
        self.selection[:, -1] = newest

    def run(self, store: Store, lengths: Tensor, *, early: bool = False) -> None:
        """One step.

        Args:
            store: holds the records.
            lengths: int64 [b], the new position included.
            early: select and resolve beside the stream, while what does not depend on it runs.
        """
        slots = self.selection
        for layer, anchor in enumerate(self.layout.anchors):
            with self._side.fork(layer) if early and layer == anchor else nullcontext():
                store.append(layer, self.new[layer])
                if layer == anchor:
                    best = self._rank(self.layout.group_of[layer], lengths)
                    slots = store.slots(layer, self.selection, best)
            self.other(self.early)
            if layer != anchor:
                slots = store.slots(layer, self.selection)
            self._side.join(layer)
            out = attend_latent(self.query[layer], store.records(layer), slots, self.packing, self.scale).out
            self.out[layer] = out
            self.other(1 - self.early)

    def _rank(self, group: int, lengths: Tensor) -> Best:
        """Scores and top-k at their true shapes; what is read is the trace's, whose misses are known.

        So is what is ranked, when somebody asks: the trace's selection, and nothing known of what comes after it.
        """
        query, weights = self.index_query[group], self.index_weights[group]
        best = self.selector.select(self.keys[group], self.table, lengths, query, weights).best

        def traced(count: int) -> Ranking:
            ranking = best(count)
            ranking.positions.fill_(-1)[:, : self.selection.shape[1]] = self.selection
            return ranking

        return traced


def packing(setup: DecodeSetup) -> LatentRecords:
    """What stands in a record."""
    return LatentRecords(512, 64, torch.bfloat16, fp8=setup.fp8)


def noise(*shape: int) -> Tensor:
    """Normally distributed, bf16, on the GPU."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def _product_us(hidden: Tensor, weights: Tensor) -> float:
    torch.mm(hidden, weights)
    return call_us(lambda _: torch.mm(hidden, weights))
