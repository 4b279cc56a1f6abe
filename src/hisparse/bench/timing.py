"""Time on the GPU: events, replays of a captured graph, and the plain copy that everything is held against."""

import statistics
from collections.abc import Callable, Sequence

import torch

REPLAYS = 5  # of a graph or a copy; the median counts
COPY_BYTES = 1 << 30
CALLS = 16  # in a graph of calls


def recorded(stream: torch.cuda.Stream, *, timing: bool = False, external: bool = False) -> torch.cuda.Event:
    """An event, recorded on `stream`. `external`: timed, and a node of the graph that is being captured."""
    event = torch.cuda.Event(enable_timing=timing or external, external=external)
    event.record(stream)
    return event


def median_us(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, reset: Callable[[], None]) -> float:
    """Microseconds of a graph's replay, the median of a few; each begins with `reset`."""
    return statistics.median(replay_us(graph, stream, reset) for _ in range(REPLAYS))


def replay_us(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, reset: Callable[[], None]) -> float:
    """Microseconds of one replay."""
    reset()
    with torch.cuda.stream(stream):
        first = recorded(stream, timing=True)
        graph.replay()
        last = recorded(stream, timing=True)
    torch.cuda.synchronize()
    return float(first.elapsed_time(last)) * 1e3


def call_us(call: Callable[[int], object]) -> float:
    """Microseconds of a call among others: the median over replays of a graph of `call(0)` to `call(15)`, by call.

    The number lets it take other inputs. It must have been called before, so that nothing is compiled in the capture.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(CALLS):
            call(number)
    return median_us(graph, torch.cuda.current_stream(), torch.cuda.synchronize) / CALLS


def between_us(events: Sequence[torch.cuda.Event]) -> list[float]:
    """Microseconds between the events of each pair."""
    return [first.elapsed_time(last) * 1e3 for first, last in zip(events[0::2], events[1::2], strict=True)]


def copy_rate() -> float:
    """GB/s of one plain copy from pinned memory, the most that the link gives."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.current_stream()
    rates: list[float] = []
    for _ in range(REPLAYS):
        first = recorded(stream, timing=True)
        target.copy_(source, non_blocking=True)
        last = recorded(stream, timing=True)
        torch.cuda.synchronize()
        rates.append(COPY_BYTES / first.elapsed_time(last) / 1e6)
    return statistics.median(rates)
