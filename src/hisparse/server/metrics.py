"""What the server tells Prometheus, from a registry of its own. Fed by the engine loop, on its thread.

The cache's counters lie on the device and reading them waits for it, so a snapshot is taken at most twice a second
while the engine runs, and once more when it has nothing left to do. Numbers of requests are those of the last step.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TypedDict

from prometheus_client import CollectorRegistry, Counter, Histogram, exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hisparse.engine import Engine, FinishReason
from hisparse.engine.scheduler import Scheduler
from hisparse.server.generation import Generation

SNAPSHOT_SECONDS = 0.5
TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TPOT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)


@dataclass(frozen=True)
class Snapshot:
    """The engine at one moment."""

    running: int = 0
    waiting: int = 0
    retracted: int = 0
    retractions: int = 0  # since the start
    hits: tuple[int, ...] = ()  # by layer, since the start
    misses: tuple[int, ...] = ()
    record_bytes: int = 0
    pools: dict[str, tuple[int, int]] = field(default_factory=dict)  # name -> (used, size)


def take_snapshot(engine: Engine) -> Snapshot:
    """Look at an engine, on its own thread, without waiting for a step that runs on a GPU."""
    cache = engine.runner.cache
    layout, pages = cache.layout, cache.host_pool.pages
    counters = cache.backend.read_counters()
    hits, misses = counters.hits.tolist(), counters.misses.tolist()
    slots = len(layout.groups) * layout.num_slots
    pools = {
        "host_pages": (layout.num_pages - pages.num_free, layout.num_pages),
        "device_slots": (slots - cache.backend.read_free_slots(), slots),
        "reservations": (layout.max_requests - len(cache.admission.free_index), layout.max_requests),
    }
    if cache.selection_state is not None:
        state = cache.selection_state.pages
        pools["selection_state_pages"] = (len(state.references) - state.num_free, len(state.references))
    return Snapshot(
        **count_requests(engine.scheduler),
        hits=tuple(hits[group] for group in layout.group_of),
        misses=tuple(misses[group] for group in layout.group_of),
        record_bytes=layout.record_bytes,
        pools=pools,
    )


class RequestCounts(TypedDict):
    """The fields of a snapshot that cost nothing to look at."""

    running: int
    waiting: int
    retracted: int
    retractions: int


def count_requests(scheduler: Scheduler) -> RequestCounts:
    """Where requests stand, on the engine's thread."""
    return RequestCounts(
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        retracted=len(scheduler.retracted),
        retractions=scheduler.num_retractions,
    )


class Metrics(Collector):
    """A watch of the engine loop (engine_loop.py), and what Prometheus reads."""

    content_type = exposition.CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._snapshot = Snapshot()
        self._taken_at = float("-inf")
        self._num_unfinished = 0
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._ttft = Histogram(
            "hisparse_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=TTFT_BUCKETS,
            registry=self._registry,
        )
        self._tpot = Histogram(
            "hisparse_time_per_output_token_seconds",
            "Of each finished request: the mean time between its tokens.",
            buckets=TPOT_BUCKETS,
            registry=self._registry,
        )
        self._ended = Counter(
            "hisparse_requests", "Requests that ended, by reason.", ["reason"], registry=self._registry
        )
        self._prompt_tokens = Counter("hisparse_prompt_tokens", "Of requests that began.", registry=self._registry)
        self._output_tokens = Counter("hisparse_output_tokens", "Of requests that ended.", registry=self._registry)

    @property
    def snapshot(self) -> Snapshot:
        """The engine as it was last seen; taken at most twice a second. May be asked for on any thread."""
        return self._snapshot

    def stepped(self, engine: Engine) -> None:
        """Take a snapshot if it is time, or else count requests alone."""
        now = time.monotonic()
        if engine.scheduler.is_idle or now - self._taken_at > SNAPSHOT_SECONDS:
            self._snapshot, self._taken_at = take_snapshot(engine), now
        else:
            self._snapshot = replace(self._snapshot, **count_requests(engine.scheduler))

    def got_first_token(self, generation: Generation) -> None:
        """Count a text's beginning."""
        if generation.first_token_at is not None:
            self._ttft.observe(generation.first_token_at - generation.asked_at)
        self._prompt_tokens.inc(len(generation.job.prompt))

    def ended(self, generation: Generation, reason: FinishReason) -> None:
        """Count a text's end."""
        self._ended.labels(reason.value).inc()
        self._output_tokens.inc(generation.num_seen)
        if generation.first_token_at is not None and generation.num_seen > 1:
            seconds = time.perf_counter() - generation.first_token_at
            self._tpot.observe(seconds / (generation.num_seen - 1))

    def text(self, num_unfinished: int) -> bytes:
        """Everything, as Prometheus reads it."""
        self._num_unfinished = num_unfinished
        return exposition.generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The figures of the last snapshot."""
        now = self._snapshot
        yield GaugeMetricFamily("hisparse_unfinished", "Requests that are not finished.", value=self._num_unfinished)
        yield GaugeMetricFamily("hisparse_running", "Requests on the device.", value=now.running)
        yield GaugeMetricFamily("hisparse_waiting", "Requests that wait for room.", value=now.waiting)
        yield GaugeMetricFamily("hisparse_retracted", "Requests taken off the device.", value=now.retracted)
        yield CounterMetricFamily(
            "hisparse_retractions", "Times that a request was taken off the device.", value=now.retractions
        )
        fetched = tuple(misses * now.record_bytes for misses in now.misses)
        yield _by_layer("hisparse_hits", "Selected positions found in the device pool.", now.hits)
        yield _by_layer("hisparse_misses", "Selected positions that were fetched.", now.misses)
        yield _by_layer("hisparse_fetched_bytes", "Bytes fetched from the host pool.", fetched)
        used = GaugeMetricFamily("hisparse_pool_used", "What is taken of a pool.", labels=["pool"])
        size = GaugeMetricFamily("hisparse_pool_size", "What there is of a pool.", labels=["pool"])
        for name, (taken, total) in now.pools.items():
            used.add_metric([name], taken)
            size.add_metric([name], total)
        yield from (used, size)


def _by_layer(name: str, meaning: str, counts: tuple[int, ...]) -> Metric:
    family = CounterMetricFamily(name, meaning, labels=["layer"])
    for layer, count in enumerate(counts):
        family.add_metric([str(layer)], count)
    return family
