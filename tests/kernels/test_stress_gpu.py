"""A hundred million resolved positions, each compared with its host row; and pools past the 32-bit limits."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from hisparse.host_pool import rows_of
from hisparse.kernels import ops
from hisparse.layout import CacheLayout
from tests.kernels.twins import Twins, shuffled_pages

pytestmark = pytest.mark.gpu

LEAST_POSITIONS = 10**8
CHECKED_AT_ONCE = 1 << 28  # bytes


@dataclass(frozen=True)
class Load:
    """What one part of the stress run drives."""

    batch: int
    k: int
    record_bytes: int
    steps: int
    slack: int = 1  # slots above k: 1 is the tightest legal pool
    pages: int = 0  # of a request; default: three times k
    shared: int = 0  # of them, the same in every request
    policy: str = "lru"

    @property
    def num_pages(self) -> int:
        """Of a request."""
        return self.pages or -(-3 * self.k // 64) + 1


LOADS = (
    Load(128, 4096, 16, 80),
    Load(128, 2048, 64, 80, slack=2048, policy="random"),
    Load(64, 2048, 1152, 140),
    Load(16, 2048, 656, 300, slack=1024),
    Load(32, 512, 48, 600, shared=8),
    Load(100, 1000, 80, 120, slack=37, policy="fifo"),
    Load(128, 32, 16, 1000),
    Load(1, 4096, 8192, 300),
    Load(3, 4096, 1152, 300, shared=40),
    Load(8, 32, 8192, 500),
    Load(1, 32, 16, 1000),
    Load(127, 333, 2048, 60, shared=3, policy="fifo"),
)


class Run:
    """One load on the GPU alone: rows, selections and checks are made there."""

    def __init__(self, load: Load, seed: int) -> None:
        pages = load.shared + load.batch * (load.num_pages - load.shared)
        layout = CacheLayout(
            num_layers=1,
            record_bytes=load.record_bytes,
            top_k=load.k,
            device_buffer_size=load.k + load.slack,
            max_requests=load.batch,
            num_pages=pages,
            max_positions=load.num_pages * 64,
        )
        self.load = load
        self.twins = Twins(layout, load.policy, seed, with_reference=False)
        self.random = torch.Generator("cuda").manual_seed(seed)
        order = shuffled_pages(layout, seed)
        common, own = order[: load.shared], order[load.shared :]
        each = load.num_pages - load.shared
        for line in range(load.batch):
            self.twins.give_pages(line, common + own[line * each : (line + 1) * each])
        self.table = self.twins.page_table.cuda()
        self.capacity = load.num_pages * 64
        self.positions = torch.rand(load.batch, self.capacity, device="cuda", generator=self.random).argsort(dim=1)
        self.offset = 0

    def select(self, step: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Selection, lines and lengths: a window over each line's own permutation that stays, drifts or jumps."""
        load = self.load
        self.offset += (0, load.k // 8, load.k, 1)[step % 4]
        columns = (torch.arange(load.k, device="cuda") + self.offset) % self.capacity
        selection = self.positions[:, columns].int()
        noise = torch.rand(selection.shape, device="cuda", generator=self.random)
        selection[noise < 0.05] = -1
        if step % 3 == 0:
            selection = selection.sort(dim=1).values
        lines = torch.arange(load.batch, device="cuda")
        lines[torch.rand(load.batch, device="cuda", generator=self.random) < 0.1] = -1
        return selection, lines, torch.full((load.batch,), length, device="cuda")

    def step(self, step: int, length: int) -> int:
        """One resolve; returns the positions resolved."""
        twins, layer = self.twins, 0
        ops.insert(
            twins.pool.tables, twins.pool.counters, twins.state, torch.full((1,), -1, device="cuda"),
            by_recency=twins.policy.by_recency,
        )  # fmt: skip
        selection, lines, lengths = self.select(step, length)
        slots = ops.resolve(
            twins.pool.tables, twins.pool.counters, twins.state, layer, selection, lines, self.table,
            twins.host[layer], twins.pool.records[layer], by_recency=twins.policy.by_recency, lengths=lengths,
        )  # fmt: skip
        if step % 5 != 4:  # now and then a list must last for two steps
            ops.rebuild_order(twins.pool.tables, twins.pool.counters, twins.state, policy=self.load.policy)
        known = selection.masked_fill((selection >= lengths[:, None]) | (lines < 0)[:, None], -1)
        rows = rows_of(self.table[lines.clamp(min=0)], known)
        check_bytes(twins, rows, slots)
        return int((rows >= 0).sum())

    def finish(self) -> None:
        assert int(self.twins.pool.counters.failed.sum()) == 0
        self.twins.check()


def check_bytes(twins: Twins, rows: Tensor, slots: Tensor) -> None:
    """As Twins.check_slots, a part at a time."""
    assert ((slots >= 0) == (rows >= 0)).all(), "a slot for a pad, or none for a record"
    rows, slots = rows[rows >= 0], slots[slots >= 0].long()
    part = max(CHECKED_AT_ONCE // twins.layout.record_bytes, 1)
    for some_rows, some_slots in zip(rows.split(part), slots.split(part), strict=True):
        got, wanted = twins.pool.records[0][some_slots], twins.truth[0][some_rows]
        assert torch.equal(got, wanted), "a slot holds another record than its row"


def test_stress() -> None:
    total = 0
    for seed, load in enumerate(LOADS):
        run = Run(load, seed)
        resolved = 0
        for step in range(load.steps):
            length = run.capacity - 64 + step % 64  # what lies past it is garbage
            resolved += run.step(step, length)
        run.finish()
        print(f"{load}: {resolved:,} positions")
        total += resolved
    print(f"{total:,} positions in all")
    assert total >= LEAST_POSITIONS


def test_pools_past_32_bits() -> None:
    """A host pool above 4 GB and a device pool above 2**31 bytes in one layer, every slot of it used."""
    load = Load(batch=75, k=4095, record_bytes=8192, steps=3, slack=1, pages=128)
    run = Run(load, seed=0)
    layout = run.twins.layout
    assert layout.num_rows * layout.record_bytes > 2**32
    assert layout.num_slots * layout.record_bytes > 2**31
    highest = 0
    for step in (2, 2, 2, 0):  # two whole churns fill and turn over the pool; the last step finds everything
        run.step(step, run.capacity)
        highest = max(highest, int(run.twins.pool.tables.slot_of_row.max()))
    assert highest == layout.num_slots - 1
    run.finish()
