"""What a decode bench is asked to measure: a slice of a published model, and how its selections move.

A slice has the model's attention, indexer, records and index groups at their true shapes. Everything else of a layer is
one product that takes a given time, because what matters of it is how long it runs and that it reads memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from hisparse.bench.resolve_setup import check_policy
from hisparse.bench.synth import Setting
from hisparse.layout import PAGE_RECORDS, CacheLayout, num_pages_for

GIB = 2**30
COLUMNS = ("full", "synchronous", "prefetch", "early", "oracle")  # early: prefetch, and select early
LONGEST_US = 100_000
SPARE_POSITIONS = 64  # that a request has room for beside its context and the steps


def every_layer(num_layers: int) -> tuple[int, ...]:
    """Each layer selects for itself."""
    return tuple(range(num_layers))


def glm_5_2(num_layers: int) -> tuple[int, ...]:
    """GLM-5.2's anchors: layers 0, 1, 2, and from there every fourth; the others share the last one's selection."""
    return tuple(layer if layer < 3 else layer - (layer - 2) % 4 for layer in range(num_layers))


class Slice(NamedTuple):
    """Of a model. All have records of 512 + 64 elements and read 2048 positions."""

    num_layers: int
    num_heads: int
    index_heads: int
    anchors: Callable[[int], tuple[int, ...]]
    top_k: int = 2048
    index_head_dim: int = 128


SLICES = {
    "glm-5.2-slice": Slice(78, 64, 32, glm_5_2),
    "glm-5.1-slice": Slice(78, 64, 32, every_layer),
    "deepseek-v3.2-slice": Slice(61, 128, 64, every_layer),
}


@dataclass(frozen=True)
class DecodeSetup:
    """What is measured.

    Raises:
        ValueError: a model that is not known, or sizes that do not fit each other.
    """

    model: str
    batch: int
    context: int  # positions of each request before the first step
    churn: float  # share of a selection that is replaced each step
    steps: int
    warm_steps: int  # before them, not counted
    other_us: float  # what the rest of a layer takes
    early_us: float  # of it, what lies between the indexer and attention: the query's up-projection
    rounds: int = 3  # of all columns; the median counts
    layers: int | None = None  # of the slice; default: all
    buffer: int | None = None  # B; default: twice top_k
    fp8: bool = False
    policy: str = "lru"
    seed: int = 0
    commit: str | None = None

    def __post_init__(self) -> None:
        if self.model not in SLICES:
            raise ValueError(f"model must be one of {', '.join(SLICES)}, got {self.model!r}")
        for name in ("batch", "steps", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        check_policy(self.policy)
        if self.warm_steps < 0:
            raise ValueError(f"warm_steps must be at least 0, got {self.warm_steps}")
        if not 1 <= self.num_layers <= self.slice.num_layers:
            raise ValueError(f"layers must be 1 to {self.slice.num_layers}, those of {self.model}, got {self.layers}")
        if not 1 <= self.other_us <= LONGEST_US:
            raise ValueError(f"other_us must be 1 to {LONGEST_US} microseconds, got {self.other_us}")
        if self.context < self.slice.top_k:
            raise ValueError(f"context must be at least top_k {self.slice.top_k}, got {self.context}")
        if not 0 <= self.early_us <= self.other_us:
            raise ValueError(f"early_us is a part of other_us: 0 to {self.other_us}, got {self.early_us}")
        self.trace.check()
        self.layout()

    @property
    def slice(self) -> Slice:
        """The model's shapes."""
        return SLICES[self.model]

    @property
    def num_layers(self) -> int:
        """How many of them."""
        return self.slice.num_layers if self.layers is None else self.layers

    @property
    def trace(self) -> Setting:
        """What the selections are generated from; every anchor gets the same."""
        steps = self.warm_steps + self.steps
        return Setting(steps, self.batch, self.slice.top_k - 1, self.context, self.churn, self.seed)

    @property
    def positions(self) -> int:
        """The most that a request will have."""
        return self.context + self.warm_steps + self.steps + SPARE_POSITIONS

    @property
    def pages_each(self) -> int:
        """Pages of each request."""
        return num_pages_for(self.positions)

    @property
    def record_bytes(self) -> int:
        """Of one record."""
        return 656 if self.fp8 else 1152

    def layout(self) -> CacheLayout:
        """Of the cache that is measured."""
        return CacheLayout(
            num_layers=self.num_layers,
            record_bytes=self.record_bytes,
            top_k=self.slice.top_k,
            device_buffer_size=2 * self.slice.top_k if self.buffer is None else self.buffer,
            max_requests=self.batch,
            num_pages=self.batch * self.pages_each,
            max_positions=self.pages_each * PAGE_RECORDS,
            anchors=self.slice.anchors(self.num_layers),
        )

    def what_is_needed(self) -> str:
        """One line: what the bench will pin and allocate at most."""
        layout = self.layout()
        device = layout.host_bytes + layout.slots_bytes + layout.table_bytes + self.index_bytes
        return (
            f"pins {layout.host_bytes / GIB:.1f} GiB of host memory, takes about {device / GIB:.1f} GiB of device "
            f"memory: all records for the column 'full', and index keys"
        )

    @property
    def index_bytes(self) -> int:
        """Device bytes of the index keys."""
        layout = self.layout()
        return len(layout.groups) * layout.num_rows * self.slice.index_head_dim * 2
