"""Time resolve on the GPU: a selection trace replayed through a captured CUDA graph, every record checked.

The graph holds all counted steps of a trace (resolve_pool.py says what a step is); the share of GPU time that
making orders takes is reported beside. `bench` yields one dictionary a batch size, ready for JSON;
commands/bench.py prints them, resolve_sweep.py and resolve_figures.py run many.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from hisparse.bench.exact_misses import exact_misses
from hisparse.bench.provenance import provenance
from hisparse.bench.resolve_pool import BenchPool, HostRecords, Snapshot
from hisparse.bench.resolve_setup import GIB, Setup, check_batches, check_gpu
from hisparse.bench.timing import between_us, copy_rate, median_us, replay_us

ALONE_AFTER, ALONE_STEPS = 16, 4  # counted steps before and in the graph of `time_alone`
REBUILDS_TIMED = 20


def bench(setup: Setup, batches: Sequence[int]) -> Iterator[dict[str, Any]]:
    """One result a batch size; the first `batch` requests of the trace take part.

    Raises:
        ValueError: a batch that the trace has no requests for.
        BuildError: no GPU, or no NVRTC.
        HiSparseError: a slot held another record than the host pool.
    """
    check_batches(setup.trace, batches)
    check_gpu()
    host = HostRecords(setup, setup.requests(max(batches)))
    rate = copy_rate()
    for batch in batches:
        pool = BenchPool(setup, batch, host)
        pool.warm_up()
        yield {**describe(setup, batch), **measure(pool, rate)}
        del pool


class Counts(NamedTuple):
    """What the counted steps did."""

    misses: float  # a call
    rebuilds: float  # a call
    exhausted: int
    failed: int


def measure(pool: BenchPool, rate: float) -> dict[str, Any]:
    """Microseconds a call, with and without IO, and what moved; `rate` is the plain copy's GB/s."""
    before = pool.snapshot()
    graph = pool.capture()
    if pool.setup.check:
        pool.run_checked()
        pool.replay_checked(graph)
        pool.restore(before)
    us = us_a_call(pool, graph, before)
    counts = count(pool, before)
    rebuild_us = time_of_rebuild(pool)
    us_no_io = us_a_call(pool, pool.capture(io=False), before)
    p10, p50, p90 = call_percentiles(pool, before)
    us_alone, us_no_io_alone = time_alone(pool, before)
    us_launch = us_a_call(pool, pool.capture(io=False, rebuild=False, padding=True), before)
    return {
        "us": round(us, 2),
        "us_p10": p10,
        "us_p50": p50,
        "us_p90": p90,
        "us_no_io": round(us_no_io, 2),
        "us_alone": round(us_alone, 2),
        "us_no_io_alone": round(us_no_io_alone, 2),
        "us_launch": round(us_launch, 2),
        **miss_fields(pool, counts.misses),
        **copy_fields(counts.misses * pool.setup.record_bytes * (1 + pool.setup.followers), us, rate),
        "rebuild_us": round(rebuild_us, 2),
        "rebuilds_a_call": round(counts.rebuilds, 4),
        "rebuild_share": round(counts.rebuilds * rebuild_us / (us + counts.rebuilds * rebuild_us), 4),
        "exhausted": counts.exhausted,
        "failed": counts.failed,
        "checked": pool.setup.check,
    }


def count(pool: BenchPool, before: Snapshot) -> Counts:
    """What was done since the snapshot; failures since the start, because none is allowed."""
    now, then = pool.pool.counters, before.counters
    return Counts(
        misses=int((now.misses - then.misses).sum()) / pool.setup.calls,
        rebuilds=int((now.rebuilds - then.rebuilds).sum()) / pool.setup.calls,
        exhausted=int((now.exhausted - then.exhausted).sum()),
        failed=int(now.failed.sum()),
    )


def miss_fields(pool: BenchPool, misses: float) -> dict[str, Any]:
    """Misses a call, beside those of the specification where they are wanted."""
    setup = pool.setup
    fields = {"misses": round(misses, 2), "miss_rate": round(misses / (pool.batch * setup.trace.k), 5)}
    if not setup.exact_misses:
        return fields
    exact = exact_misses(setup, pool.batch)
    ratio = round(misses / exact, 5) if exact else None
    return {**fields, f"misses_exact_{setup.policy}": round(exact, 2), "miss_ratio": ratio}


def copy_fields(moved: float, us: float, rate: float) -> dict[str, Any]:
    """What `moved` bytes in `us` are, beside a plain copy."""
    of_copy = moved / rate / 1e3
    return {
        "gb_per_s": round(moved / us / 1e3, 2),
        "copy_gb_per_s": round(rate, 2),
        "us_of_copy": round(of_copy, 2),
        "ratio_to_copy": round(us / of_copy, 3) if moved else None,
    }


def us_a_call(pool: BenchPool, graph: torch.cuda.CUDAGraph, before: Snapshot, calls: int = 0) -> float:
    """Mean microseconds a call of a graph of `calls` (default: all counted ones), the median of some replays."""
    return median_us(graph, pool.main, partial(pool.restore, before)) / (calls or pool.setup.calls)


def time_alone(pool: BenchPool, before: Snapshot) -> tuple[float, float]:
    """Microseconds a call with and without IO of a few steps in a row, no order made in between.

    What a layer waits for when the making of orders is well hidden; the pool is full and the orders are fresh.
    A short trace has fewer steps before them, or none.
    """
    counted = pool.setup.counted_steps
    num_steps = min(ALONE_STEPS, counted)
    first = min(ALONE_AFTER, counted - num_steps)
    pool.restore(before)
    pool.advance(first)
    full = pool.snapshot()
    steps = range(pool.setup.warm_steps + first, pool.setup.warm_steps + first + num_steps)
    calls = num_steps * pool.setup.layers
    with_io, without = (
        us_a_call(pool, pool.capture(io=io, rebuild=False, steps=steps), full, calls) for io in (True, False)
    )
    return with_io, without


def call_percentiles(pool: BenchPool, before: Snapshot) -> tuple[float, float, float]:
    """p10, p50 and p90 of a single call, between event nodes, which add about a microsecond to each."""
    events: list[torch.cuda.Event] = []
    graph = pool.capture(events=events)
    for _ in range(2):
        replay_us(graph, pool.main, partial(pool.restore, before))
    cuts = statistics.quantiles(between_us(events), n=10, method="inclusive")
    return round(cuts[0], 2), round(cuts[4], 2), round(cuts[8], 2)


def time_of_rebuild(pool: BenchPool) -> float:
    """Microseconds to make one layer's order anew, alone on the GPU."""
    tables = pool.pool.layer(0)

    def make_due() -> None:
        tables.cursor.copy_(tables.listed)
        tables.num_free.zero_()

    def both() -> None:
        make_due()
        pool.rebuild(range(1))

    return max(_repeated_us(pool, both) - _repeated_us(pool, make_due), 0.0)


def _repeated_us(pool: BenchPool, work: Callable[[], None]) -> float:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=pool.main):
        for _ in range(REBUILDS_TIMED):
            work()
    return median_us(graph, pool.main, torch.cuda.synchronize) / REBUILDS_TIMED


def describe(setup: Setup, batch: int) -> dict[str, Any]:
    """What a result belongs to."""
    return {
        **provenance(setup.commit),
        "trace": setup.trace.name,
        **setup.trace.about,
        "batch": batch,
        "k": setup.trace.k,
        "buffer": setup.buffer,
        "record_bytes": setup.record_bytes,
        "context": setup.trace.context,
        "steps": setup.counted_steps,
        "warm_steps": setup.warm_steps,
        "layers": setup.layers,
        "followers": setup.followers,
        "lines": setup.trace.lines,
        "host_gib": round(setup.host_bytes(setup.requests(batch)) / GIB, 2),
        "host_ranges": setup.host_ranges,
        "pages": "shuffled" if setup.shuffled_pages else "contiguous",
        "policy": setup.policy,
    }
