"""Expected misses from a recorded trace: the simulator's rates under the configuration's policy."""

from collections.abc import Sequence
from pathlib import Path

from hisparse.plan.misses import MissCurve
from hisparse.trace.read import open_trace
from hisparse.trace.simulator import simulate
from hisparse.trace.stream import make_stream

WARM_UP = 6  # the first sixth of the steps fills the cache, and is not counted
LOWEST_RATE = 1e-6  # of a trace that never misses: a power law has no zero


def curve_of_trace(path: Path, policy: str, ratios: Sequence[int]) -> MissCurve:
    """The policy's miss rates at these multiples of the trace's k.

    Raises `ValueError` for a file that is no trace, and for a policy that needs scores which the trace lacks.
    """
    trace = open_trace(path)
    stream, skip = make_stream(trace), trace.num_steps // WARM_UP
    points = []
    for ratio in ratios:
        misses = simulate(stream, policy, ratio * trace.k).misses[skip:]
        points.append((float(ratio), max(float(misses.mean()) / trace.k, LOWEST_RATE)))
    return MissCurve(f"{policy} on the trace {trace.name} (k {trace.k}, {trace.num_steps:,} steps)", tuple(points))
