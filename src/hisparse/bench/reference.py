"""What the reference backend's bookkeeping costs: a resolve against a plain copy of the records it moves.

One resolve of [8, 512] with 1536 B records, B = 1024, against an index_select and an index_copy_ of the 4,096
records that the selection names. "churn" selects nothing of the step before, as after a change of subject; "drift"
replaces about an eighth of the selection at every step, as decoding does.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from hisparse.cache import HierarchicalCache
from hisparse.layout import CacheLayout

BATCH, TOP_K, BUFFER, RECORD_BYTES, CONTEXT = 8, 512, 1024, 1536, 4096
WARM_UP = 4  # steps before timing


def measure(repeats: int) -> Iterator[dict[str, object]]:
    """One row a case: milliseconds of a resolve, of the copies, and the ratios; medians of `repeats`."""
    for case, share in (("churn", 1.0), ("drift", 0.125)):
        cache = _filled_cache()
        timed = [_resolve(cache, selection) for selection in _selections(share, repeats + WARM_UP)][WARM_UP:]
        resolve_ms = statistics.median(ms for ms, _ in timed)
        misses = int(statistics.median(count for _, count in timed))
        copy_ms = _copy_ms(cache, BATCH * TOP_K, repeats)
        yield {
            "case": case,
            "batch": BATCH,
            "k": TOP_K,
            "buffer": BUFFER,
            "record_bytes": RECORD_BYTES,
            "misses": misses,
            "resolve_ms": resolve_ms,
            "copy_ms": copy_ms,
            "ratio": resolve_ms / copy_ms,
        }


def _resolve(cache: HierarchicalCache, selection: Tensor) -> tuple[float, int]:
    """Milliseconds of one resolve, and its misses."""
    before = cache.statistics().misses
    with cache.step(cache.requests):
        cache.append(0, torch.zeros(BATCH, RECORD_BYTES, dtype=torch.uint8))
        seconds = _timed(partial(cache.resolve, 0, selection))
    return seconds * 1e3, cache.statistics().misses - before


def _filled_cache() -> HierarchicalCache:
    pages = BATCH * (CONTEXT + 128) // 64
    layout = CacheLayout(1, RECORD_BYTES, TOP_K, BUFFER, BATCH, pages, CONTEXT + 128)
    cache = HierarchicalCache(layout)
    for _ in range(BATCH):
        request = cache.admit(CONTEXT + 128)
        cache.stage(0, request, 0, torch.randint(0, 256, (CONTEXT, RECORD_BYTES), dtype=torch.uint8))
    return cache


def _selections(share: float, steps: int) -> list[Tensor]:
    """Each step replaces this share of every request's selection by positions not in it."""
    random = torch.Generator().manual_seed(0)
    current = torch.stack([torch.randperm(CONTEXT, generator=random)[:TOP_K] for _ in range(BATCH)])
    out = []
    for _ in range(steps):
        out.append(current.sort(dim=1).values.int())
        count = int(share * TOP_K)
        rows = []
        for row in current:
            outside = torch.ones(CONTEXT, dtype=torch.bool)
            outside[row] = False
            others = outside.nonzero().flatten()
            fresh = others[torch.randperm(len(others), generator=random)[:count]]
            rows.append(torch.cat([row[torch.randperm(TOP_K, generator=random)[count:]], fresh]))
        current = torch.stack(rows)
    return out


def _copy_ms(cache: HierarchicalCache, count: int, repeats: int) -> float:
    """Milliseconds of an index_select and an index_copy_ of `count` scattered records."""
    host, pool = cache.host_pool.records[0], cache.records(0)
    times = []
    for _ in range(repeats):
        rows, slots = torch.randperm(host.shape[0])[:count], torch.randperm(pool.shape[0])[:count]
        times.append(_timed(partial(_copy, host, rows, pool, slots)))
    return statistics.median(times) * 1e3


def _copy(host: Tensor, rows: Tensor, pool: Tensor, slots: Tensor) -> None:
    pool.index_copy_(0, slots, host.index_select(0, rows))


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
