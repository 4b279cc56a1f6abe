"""A GPU that is none: the bench's own bookkeeping, run on the CPU with the reference in the kernels' place.

Streams order nothing and events tell invented times; a captured graph is the list of its calls, which a replay
makes. So counts and checks are real, and times are not.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hisparse import reference
from hisparse.bench import resolve_pool
from hisparse.device_pool import Counters, SlotTables, hit
from hisparse.kernels.state import LaunchState, MissPlan
from hisparse.layout import PAGE_RECORDS
from hisparse.order import POLICIES
from hisparse.reference.rebuild_order import order_is_due

MS_BETWEEN_EVENTS = 0.25


class Graph(list[Callable[[], None]]):
    """A captured graph."""

    capturing: "Graph | None" = None

    def replay(self) -> None:
        for call in self:
            call()


class Stream:
    def wait_event(self, event: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...


class Event:
    def __init__(self, *, enable_timing: bool, external: bool) -> None: ...

    def record(self, stream: Stream) -> None: ...

    def elapsed_time(self, later: Self) -> float:
        return MS_BETWEEN_EVENTS


class OnCpu(TorchFunctionMode):
    """Sends what is meant for the GPU, and pinned memory, to plain CPU memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {key: value for key, value in (kwargs or {}).items() if key != "pin_memory"}
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is Tensor.cuda or (func is Tensor.to and str(args[-1]) == "cuda"):
            return args[0]
        return func(*args, **kwargs)


def resolve(
    tables: SlotTables,
    counters: Counters,
    state: LaunchState,
    layer: int,
    selection: Tensor,
    lines: Tensor,
    page_table: Tensor,
    host: Tensor,
    pool: Tensor,
    *,
    slots: Tensor,
    plan: MissPlan | None,
    io: bool,
    by_recency: bool,
    **_: Any,
) -> None:
    """`ops.resolve`, whatever the policy is called that goes by recency or not."""
    state.step[layer] += 1
    pages = page_table[lines].gather(1, selection.long().clamp(min=0) // PAGE_RECORDS)
    rows = torch.where(selection < 0, -1, pages.long() * PAGE_RECORDS + selection % PAGE_RECORDS)
    policy = POLICIES["lru" if by_recency else "fifo"]
    target = pool if io else torch.empty_like(pool)
    views = SlotTables(*(table[layer] for table in tables))
    found = reference.resolve(views, rows, int(state.step[layer]), policy, host, target)
    slots.copy_(found.slots)
    if plan is not None:
        plan.num_misses.fill_(found.misses)
        plan.rows[: found.misses], plan.slots[: found.misses] = found.miss_rows.int(), found.miss_slots.int()
    for counter, number in zip(counters, (found.hits, found.misses, 0, found.exhausted, found.failed), strict=True):
        counter[layer] += number


def replay(plan: MissPlan, host: Tensor, pool: Tensor) -> None:
    """`ops.replay`."""
    count = int(plan.num_misses)
    reference.replay(plan.rows[:count].long(), plan.slots[:count].long(), host, pool)


def rebuild_order(
    tables: SlotTables, counters: Counters, state: LaunchState, *, policy: str, first_layer: int, num_layers: int
) -> None:
    """`ops.rebuild_order`."""
    for layer in range(first_layer, first_layer + num_layers):
        views, step = SlotTables(*(table[layer] for table in tables)), int(state.step[layer])
        if order_is_due(views, POLICIES[policy]):
            reference.rebuild_order(views, step, POLICIES[policy], hit(step))
            counters.rebuilds[layer] += 1


@contextmanager
def capture(graph: Graph, stream: Stream) -> Iterator[None]:
    Graph.capturing = graph
    yield
    Graph.capturing = None


def captured(operation: Callable[..., None]) -> Callable[..., None]:
    """Calls the operation, or keeps the call for a replay."""

    def call(*args: Any, **kwargs: Any) -> None:
        made = partial(operation, *args, **kwargs)
        made() if Graph.capturing is None else Graph.capturing.append(made)

    return call


@contextmanager
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything that a bench asks of torch.cuda and of the kernels, on the CPU."""

    @contextmanager
    def on_stream(stream: Stream) -> Iterator[None]:
        yield

    for name, value in {
        "is_available": lambda: True, "get_device_name": lambda: "none", "synchronize": lambda: None,
        "Stream": Stream, "Event": Event, "current_stream": Stream, "stream": on_stream,
        "CUDAGraph": Graph, "graph": capture,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    operations = SimpleNamespace(**{one.__name__: captured(one) for one in (resolve, replay, rebuild_order)})
    monkeypatch.setattr(resolve_pool, "ops", operations)
    monkeypatch.setattr(resolve_pool, "allocate", lambda shape, *, pinned: torch.empty(shape, dtype=torch.uint8))
    monkeypatch.setattr("hisparse.bench.timing.COPY_BYTES", 1 << 20)
    monkeypatch.setattr("hisparse.bench.timing.REPLAYS", 1)
    with OnCpu():
        yield
