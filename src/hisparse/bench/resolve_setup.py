"""What a resolve bench is asked to measure, checked whole before anything is made or pinned."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from hisparse.bench.timing import COPY_BYTES
from hisparse.bench.trace import SelectionTrace
from hisparse.kernels.build import BuildError
from hisparse.layout import PAGE_RECORDS, CacheLayout, num_pages_for
from hisparse.order import POLICIES

GIB = 2**30
BATCHES = (1, 4, 16, 32, 64)
LAYERS = 16
MIN_COUNTED_STEPS = 2


@dataclass(frozen=True)
class Setup:
    """What is measured.

    Raises:
        ValueError: sizes that do not fit each other or the trace.
    """

    trace: SelectionTrace
    buffer: int  # B, slots for each request and layer
    record_bytes: int
    warm_steps: int  # not counted
    policy: str = "lru"
    layers: int = LAYERS
    check: bool = True
    shuffled_pages: bool = False  # a request's pages lie all over the host pool, as after long use
    own_ranges: bool = False  # each layer has a part of the host pool of its own, as in a cache
    followers: int = 0  # layers that share each layer's selection, with records of their own; their fetches follow
    exact_misses: bool = False  # count them by the specification too
    commit: str | None = None  # for results, where there is no git history
    shape: tuple[int, int, int] | None = None  # of the launch, to override the choice

    def __post_init__(self) -> None:
        check_policy(self.policy)
        if self.exact_misses and POLICIES[self.policy].heated:
            raise ValueError(f"exact misses are counted from the tables alone, and {self.policy} ranks by more")
        if self.exact_misses and self.trace.lines > 1:
            raise ValueError(f"exact misses are counted for one line of a request, got {self.trace.lines}")
        last = self.trace.steps - MIN_COUNTED_STEPS
        if last < 0:
            raise ValueError(f"a trace must have at least {MIN_COUNTED_STEPS} steps to count, got {self.trace.steps}")
        if not 0 <= self.warm_steps <= last:
            raise ValueError(
                f"warm_steps must be from 0 to {last}, so that of {self.trace.steps} steps {MIN_COUNTED_STEPS} count, "
                f"got {self.warm_steps}"
            )
        if self.trace.layers not in (1, self.layers):
            raise ValueError(f"layers must be {self.trace.layers}, those of the trace, got {self.layers}")
        if self.followers and not self.own_ranges:
            raise ValueError(f"followers have records of their own: {self.followers} of them need own_ranges")
        self.layout(self.trace.batch)

    @property
    def host_ranges(self) -> int:
        """Parts of the host pool; without ranges of their own all layers read the same one."""
        return self.layers * (1 + self.followers) if self.own_ranges else 1

    @property
    def counted_steps(self) -> int:
        """Steps of the trace that are measured."""
        return self.trace.steps - self.warm_steps

    @property
    def calls(self) -> int:
        """Resolves that are measured."""
        return self.counted_steps * self.layers

    @property
    def pages_each(self) -> int:
        """Pages of the host pool that a request has."""
        return num_pages_for(self.trace.context)

    def layout(self, batch: int, host_requests: int | None = None) -> CacheLayout:
        """The cache of `batch` lines, over a host pool of `host_requests`; each of `layers` is an index group."""
        in_group = 1 + self.followers
        return CacheLayout(
            num_layers=self.layers * in_group,
            anchors=tuple(layer - layer % in_group for layer in range(self.layers * in_group)),
            record_bytes=self.record_bytes,
            top_k=self.trace.k,
            device_buffer_size=self.buffer,
            max_requests=batch,
            num_pages=self.pages_each * (host_requests or self.requests(batch)),
            max_positions=self.pages_each * PAGE_RECORDS,
        )

    def requests(self, batch: int) -> int:
        """Requests that `batch` lines of a selection belong to."""
        return -(-batch // self.trace.lines)

    def host_bytes(self, requests: int) -> int:
        """Bytes of the host pool of so many requests."""
        return self.host_ranges * requests * self.pages_each * PAGE_RECORDS * self.record_bytes


def default_batches(trace: SelectionTrace) -> tuple[int, ...]:
    """The usual sizes that a trace allows, and all of its requests."""
    return tuple(sorted({batch for batch in BATCHES if batch <= trace.batch} | {trace.batch}))


def check_policy(policy: str) -> None:
    """Raise `ValueError` for one that does not exist."""
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}")


def check_batches(trace: SelectionTrace, batches: Sequence[int]) -> None:
    """Raise `ValueError` unless the trace has requests for every batch."""
    for batch in batches:
        if not 1 <= batch <= trace.batch:
            raise ValueError(f"a batch must be from 1 to {trace.batch}, the requests of the trace, got {batch}")
        if batch % trace.lines:
            raise ValueError(f"a batch must be whole requests of {trace.lines} lines each, got {batch}")


def check_gpu() -> None:
    """Raise `BuildError` where there is nothing to measure."""
    if not torch.cuda.is_available():
        raise BuildError(
            "no usable NVIDIA GPU: torch.cuda.is_available() is False. "
            "'hisparse bench reference' measures the CPU backend"
        )


def what_is_needed(setup: Setup, points: Iterable[tuple[int, int]]) -> str:
    """One line: what the bench will pin and allocate at most, for pairs of B and batch."""
    layouts = [replace(setup, buffer=buffer).layout(batch) for buffer, batch in points]
    requests = max(setup.requests(layout.max_requests) for layout in layouts)
    host = setup.host_bytes(requests)
    device = host + COPY_BYTES + max(layout.slots_bytes + layout.table_bytes for layout in layouts)
    return (
        f"pins {(host + COPY_BYTES) / GIB:.2f} GiB of host memory ({host / GIB:.2f} for the records of {requests} "
        f"requests, {COPY_BYTES / GIB:.2f} for the plain copy), takes {device / GIB:.2f} GiB of device memory"
    )
