"""Microseconds of a call in a captured graph, where other calls of the same kind stand before and behind it."""

import statistics
from collections.abc import Callable

import torch

from hisparse.bench.timing import recorded

CALLS, REPLAYS = 16, 7


def call_us(call: Callable[[int], object]) -> float:
    """The median over replays of a graph of `call(0)` to `call(15)`, by call. The number lets it take other inputs.

    `call` must have been called before, so that nothing is compiled while the graph is captured.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(CALLS):
            call(number)
    stream, times = torch.cuda.current_stream(), []
    for _ in range(REPLAYS):
        first = recorded(stream, timing=True)
        graph.replay()
        last = recorded(stream, timing=True)
        torch.cuda.synchronize()
        times.append(float(first.elapsed_time(last)) * 1e3 / CALLS)
    return statistics.median(times)
