"""The selections of a trace file as a bench replays them: some layers, each with the same requests."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hisparse.trace import open_trace


def read_trace(path: Path, layers: tuple[int, ...] = ()) -> NDArray[np.int32]:
    """A file's selections, int32 [steps, layers, batch, k]; layers is 1 unless several are asked for.

    Args:
        path: see `open_trace`.
        layers: of a recorded trace; batch is 1 then.

    Raises:
        ValueError: what was expected of the file, and what came.
    """
    trace = open_trace(path)
    if trace.line_name == "request":
        if layers:
            raise ValueError(f"--trace-layer is for a recorded trace (an .npz with 'delta'), and {path} has no layers")
        return trace.selection[:, None]
    if not layers or not set(layers) <= set(trace.lines):
        came = ", ".join(map(str, layers)) or "none"
        raise ValueError(f"the trace {path} has layers {trace.spans}: choose with --trace-layer, got {came}")
    found = trace.of_lines(layers).selection
    if (found < 0).any():
        raise ValueError(f"a bench replays selections of k positions each, and some of {path} have fewer")
    return found[:, :, None]
