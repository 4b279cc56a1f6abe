"""Time resolve on the GPU: a selection trace replayed through a captured CUDA graph, every record checked.

The graph holds all counted steps of a trace. A step resolves the same selection in each of a few layers, as a
model does, and makes each layer's order anew on a side stream: forked after the layer's resolve, joined before
its next one. So the order's making is off the path, and its share of GPU time is reported beside. Layers have
tables and slots of their own and read one host pool, to save pinning time.

`bench` yields one dictionary a batch size, ready for JSON; commands/bench.py prints them.
"""

import statistics
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hisparse.device_pool import DevicePool
from hisparse.errors import HiSparseError
from hisparse.kernels import ops
from hisparse.kernels.state import new_launch_state
from hisparse.layout import PAGE_RECORDS, CacheLayout, num_pages_for
from hisparse.order import POLICIES

Trace = NDArray[np.int32]  # [steps, batch, k] positions
REPLAYS = 5  # of a graph; the median counts
ALONE_AFTER, ALONE_STEPS = 16, 4  # counted steps before and in the graph of `time_alone`
COPY_BYTES = 1 << 30  # of the plain copy that everything is held against
MULTIPLIER, INCREMENT = 0x9E3779B97F4A7C15 - 2**64, 12345  # the host pool's contents


@dataclass(frozen=True)
class Setup:
    """What is measured."""

    trace: Trace
    context: int  # positions a request has
    buffer: int  # B, slots for each request and layer
    record_bytes: int
    warm_steps: int  # not counted
    policy: str = "lru"
    layers: int = 16
    check: bool = True
    shape: tuple[int, int, int] | None = None  # of the launch, to override the choice


def bench(setup: Setup, batches: Sequence[int]) -> Iterator[dict[str, Any]]:
    """One result a batch size; the first `batch` requests of the trace take part.

    Raises:
        BuildError: no GPU, or no NVRTC.
        HiSparseError: a slot held another record than the host pool.
    """
    host = HostRecords(setup)
    rate = copy_rate()
    for batch in batches:
        pool = BenchPool(setup, batch, host)
        pool.warm_up()
        yield {**describe(setup, batch), **measure(pool, rate)}
        del pool


class HostRecords:
    """A pinned host pool for every request of a trace, with its contents on the device to check against."""

    def __init__(self, setup: Setup) -> None:
        self.pages_each = num_pages_for(setup.context)
        self.num_pages = self.pages_each * setup.trace.shape[1]
        rows = self.num_pages * PAGE_RECORDS
        words = torch.arange(rows * setup.record_bytes // 8, device="cuda") * MULTIPLIER + INCREMENT
        self.truth = words.view(torch.uint8).view(rows, setup.record_bytes)
        self.records = torch.empty(rows, setup.record_bytes, dtype=torch.uint8, pin_memory=True)
        self.records.copy_(self.truth)

    def page_table(self, batch: int, layer: int, num_layers: int) -> Tensor:
        """A layer's page table, int32 [batch, pages]: shuffled pages of `batch` requests' share of the host pool.

        The layers read different rows. What a batch reads from grows with it: past 2 GB the link gets slower.
        """
        num_pages = batch * self.pages_each
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(0))
        shifted = (order + layer * (num_pages // num_layers)) % num_pages
        return shifted.int().view(batch, self.pages_each).cuda()

    def rows(self, page_table: Tensor, selection: Tensor) -> Tensor:
        """int64 [b, k]."""
        page = page_table.gather(1, selection.long() // PAGE_RECORDS)
        rows: Tensor = page.long() * PAGE_RECORDS + selection % PAGE_RECORDS
        return rows


class BenchPool:
    """Layers' pools for the first `batch` requests, and the steps that drive them."""

    def __init__(self, setup: Setup, batch: int, host: HostRecords) -> None:
        self.setup, self.batch, self.host = setup, batch, host
        self.selections = torch.from_numpy(np.ascontiguousarray(setup.trace[:, :batch])).cuda()
        k = setup.trace.shape[2]
        layout = CacheLayout(
            num_layers=setup.layers,
            record_bytes=setup.record_bytes,
            top_k=k,
            device_buffer_size=setup.buffer,
            max_requests=batch,
            num_pages=host.num_pages,
            max_positions=host.pages_each * PAGE_RECORDS,
        )
        device = torch.device("cuda")
        self.pool = DevicePool(layout, device)
        self.state = new_launch_state(setup.layers, device)
        self.lines = torch.arange(batch, dtype=torch.int32, device=device)
        self.slots = torch.empty(setup.layers, batch, k, dtype=torch.int32, device=device)
        self.page_tables = [host.page_table(batch, layer, setup.layers) for layer in range(setup.layers)]
        self.main, self.side = torch.cuda.Stream(), torch.cuda.Stream()
        self.by_recency = POLICIES[setup.policy].by_recency

    def resolve(self, step: int, layer: int, *, io: bool) -> None:
        """One call."""
        ops.resolve(
            self.pool.tables, self.pool.counters, self.state, layer, self.selections[step], self.lines,
            self.page_tables[layer], self.host.records, self.pool.records[layer], by_recency=self.by_recency,
            slots=self.slots[layer], begins_step=True, io=io, shape=self.setup.shape,
        )  # fmt: skip

    def rebuild(self, group: int) -> None:
        """Make the orders of half of the layers anew where they are due."""
        half = self.setup.layers // 2
        ops.rebuild_order(
            self.pool.tables, self.pool.counters, self.state,
            policy=self.setup.policy, first_layer=group * half, num_layers=half,
        )  # fmt: skip

    def warm_up(self) -> None:
        """The steps that are not counted, one by one."""
        with torch.cuda.stream(self.main):
            for step in range(self.setup.warm_steps):
                self._whole_step(step)
            saved = self.snapshot()
            self.resolve(0, 0, io=False)  # loads that kernel too: nothing is compiled inside a capture
            self.restore(saved)
        torch.cuda.synchronize()

    def run_checked(self) -> None:
        """All counted steps, one by one, each slot compared with its host row."""
        with torch.cuda.stream(self.main):
            for step in range(self.setup.warm_steps, len(self.selections)):
                self._whole_step(step)
                for layer in range(self.setup.layers):
                    rows = self.host.rows(self.page_tables[layer], self.selections[step])
                    got = self.pool.records[layer][self.slots[layer].long().flatten()]
                    if not torch.equal(got, self.host.truth[rows.flatten()]):
                        raise HiSparseError(f"step {step}, layer {layer}: a slot holds another record than its row")
        torch.cuda.synchronize()

    def _whole_step(self, step: int) -> None:
        for layer in range(self.setup.layers):
            self.resolve(step, layer, io=True)
        self.rebuild(0)
        self.rebuild(1)

    def advance(self, steps: int) -> None:
        """The first counted steps, one by one, and then a fresh order in every layer."""
        with torch.cuda.stream(self.main):
            for step in range(self.setup.warm_steps, self.setup.warm_steps + steps):
                self._whole_step(step)
            self.pool.tables.cursor.copy_(self.pool.tables.listed)
            self.rebuild(0)
            self.rebuild(1)
        torch.cuda.synchronize()

    def capture(
        self, *, io: bool = True, rebuild: bool = True, events: list[Any] | None = None, steps: range | None = None
    ) -> torch.cuda.CUDAGraph:
        """The counted steps as one graph; `events` gets one before and one after each call."""
        graph = torch.cuda.CUDAGraph()
        joins: dict[int, torch.cuda.Event] = {}
        with torch.cuda.graph(graph, stream=self.main):
            for step in steps or range(self.setup.warm_steps, len(self.selections)):
                for group in (0, 1):
                    if group in joins:
                        self.main.wait_event(joins[group])
                    self._capture_group(step, group, io, events)
                    if rebuild:
                        self.side.wait_event(_recorded(self.main))
                        with torch.cuda.stream(self.side):
                            self.rebuild(group)
                            joins[group] = _recorded(self.side)
            if rebuild:
                self.main.wait_stream(self.side)
        return graph

    def _capture_group(self, step: int, group: int, io: bool, events: list[Any] | None) -> None:
        half = self.setup.layers // 2
        for layer in range(group * half, (group + 1) * half):
            if events is not None:
                events.append(_recorded(self.main, external=True))
            self.resolve(step, layer, io=io)
            if events is not None:
                events.append(_recorded(self.main, external=True))

    def snapshot(self) -> list[Tensor]:
        """A copy of everything that a step changes, except the records."""
        return [table.clone() for table in self._changing()]

    def restore(self, saved: list[Tensor]) -> None:
        """Go back to a snapshot."""
        for table, before in zip(self._changing(), saved, strict=True):
            table.copy_(before)
        torch.cuda.synchronize()

    def _changing(self) -> list[Tensor]:
        return [*self.pool.tables, *self.pool.counters, self.state.control, self.state.bins]

    @property
    def calls(self) -> int:
        """Resolves in a graph."""
        return (len(self.selections) - self.setup.warm_steps) * self.setup.layers


def measure(pool: BenchPool, rate: float) -> dict[str, Any]:
    """Microseconds a call, with and without IO, and what moved."""
    saved = pool.snapshot()
    if pool.setup.check:
        pool.run_checked()
        pool.restore(saved)
    us = timed_graph(pool, pool.capture(), saved)
    misses = int(pool.pool.counters.misses.sum() - saved[11].sum()) / pool.calls
    rebuilds = int(pool.pool.counters.rebuilds.sum() - saved[12].sum()) / pool.calls
    exhausted = int(pool.pool.counters.exhausted.sum() - saved[13].sum())
    failed = int(pool.pool.counters.failed.sum())
    rebuild_us = time_of_rebuild(pool)
    us_no_io = timed_graph(pool, pool.capture(io=False), saved)
    p10, p50, p90 = call_percentiles(pool, saved)
    us_alone, us_no_io_alone = time_alone(pool, saved)
    moved = misses * pool.setup.record_bytes
    return {
        "us": round(us, 2),
        "us_p10": p10,
        "us_p50": p50,
        "us_p90": p90,
        "us_no_io": round(us_no_io, 2),
        "us_alone": round(us_alone, 2),
        "us_no_io_alone": round(us_no_io_alone, 2),
        "misses": round(misses, 2),
        "miss_rate": round(misses / (pool.batch * pool.selections.shape[2]), 5),
        "gb_per_s": round(moved / us / 1e3, 2),
        "copy_gb_per_s": round(rate, 2),
        "us_of_copy": round(moved / rate / 1e3, 2),
        "ratio_to_copy": round(us / (moved / rate / 1e3), 3) if moved else None,
        "rebuild_us": round(rebuild_us, 2),
        "rebuilds_a_call": round(rebuilds, 4),
        "rebuild_share": round(rebuilds * rebuild_us / (us + rebuilds * rebuild_us), 4),
        "exhausted": exhausted,
        "failed": failed,
        "checked": pool.setup.check,
    }


def timed_graph(pool: BenchPool, graph: torch.cuda.CUDAGraph, saved: list[Tensor]) -> float:
    """Mean microseconds a call, the median of the replays."""
    return statistics.median(_replay_us(pool, graph, saved) for _ in range(REPLAYS)) / pool.calls


def _replay_us(pool: BenchPool, graph: torch.cuda.CUDAGraph, saved: list[Tensor]) -> float:
    pool.restore(saved)
    with torch.cuda.stream(pool.main):
        first = _recorded(pool.main, timing=True)
        graph.replay()
        last = _recorded(pool.main, timing=True)
    torch.cuda.synchronize()
    return float(first.elapsed_time(last)) * 1e3


def time_alone(pool: BenchPool, saved: list[Tensor]) -> tuple[float, float]:
    """Microseconds a call with and without IO of a few steps in a row, no order made in between.

    What a layer waits for when the making of orders is well hidden; the pool is full and the orders are fresh.
    """
    pool.restore(saved)
    pool.advance(ALONE_AFTER)
    before = pool.snapshot()
    first = pool.setup.warm_steps + ALONE_AFTER
    steps = range(first, first + ALONE_STEPS)
    times = []
    for io in (True, False):
        graph = pool.capture(io=io, rebuild=False, steps=steps)
        times.append(statistics.median(_replay_us(pool, graph, before) for _ in range(REPLAYS)))
    calls = len(steps) * pool.setup.layers
    return times[0] / calls, times[1] / calls


def call_percentiles(pool: BenchPool, saved: list[Tensor]) -> tuple[float, float, float]:
    """p10, p50 and p90 of a single call, between event nodes, which add about a microsecond to each."""
    events: list[Any] = []
    graph = pool.capture(events=events)
    _replay_us(pool, graph, saved)
    _replay_us(pool, graph, saved)
    times = [a.elapsed_time(b) * 1e3 for a, b in zip(events[0::2], events[1::2], strict=True)]
    cuts = statistics.quantiles(times, n=10, method="inclusive")
    return round(cuts[0], 2), round(cuts[4], 2), round(cuts[8], 2)


def time_of_rebuild(pool: BenchPool) -> float:
    """Microseconds to make one layer's order anew, alone on the GPU."""
    tables = pool.pool.layer(0)

    def make_due() -> None:
        tables.cursor.copy_(tables.listed)
        tables.num_free.zero_()

    def both() -> None:
        make_due()
        pool.rebuild(0)

    return max(_graph_us(pool, both) - _graph_us(pool, make_due), 0.0)


def _graph_us(pool: BenchPool, work: Callable[[], None], repeats: int = 20) -> float:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=pool.main):
        for _ in range(repeats):
            work()
    times = [_replay_us(pool, graph, pool.snapshot()) for _ in range(REPLAYS)]
    return statistics.median(times) / repeats


def copy_rate() -> float:
    """GB/s of one plain copy from pinned memory, the most that the link gives."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.current_stream()
    rates: list[float] = []
    for _ in range(REPLAYS):
        first = _recorded(stream, timing=True)
        target.copy_(source, non_blocking=True)
        last = _recorded(stream, timing=True)
        torch.cuda.synchronize()
        rates.append(COPY_BYTES / first.elapsed_time(last) / 1e6)
    return statistics.median(rates)


def describe(setup: Setup, batch: int) -> dict[str, Any]:
    """What a result belongs to."""
    return {
        "device": torch.cuda.get_device_name(),
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "commit": _first_line("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"),
        "batch": batch,
        "k": setup.trace.shape[2],
        "buffer": setup.buffer,
        "record_bytes": setup.record_bytes,
        "context": setup.context,
        "steps": len(setup.trace) - setup.warm_steps,
        "layers": setup.layers,
        "host_gib": round(batch * setup.context * setup.record_bytes / 2**30, 2),
        "policy": setup.policy,
    }


def _first_line(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().partition("\n")[0] or None


def _recorded(stream: torch.cuda.Stream, *, timing: bool = False, external: bool = False) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=timing or external, external=external)
    event.record(stream)
    return event
