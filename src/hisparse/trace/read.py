"""One reader for every kind of trace file: the project's own (format.py) and NumPy's (arrays.py)."""

from pathlib import Path

import numpy as np

from hisparse.trace.arrays import check_k, read_arrays
from hisparse.trace.file import TraceFile
from hisparse.trace.format import MAGIC, Steps
from hisparse.trace.trace import Positions, Trace, ascending, check_distinct

NUMPY = (".npy", ".npz")


def open_trace(path: Path, k: int | None = None) -> Trace:
    """A file's trace, told by its content.

    Args:
        path: a trace file of `hisparse trace record`, or a .npy or .npz (see arrays.py).
        k: positions of a selection to take; default: what the trace was recorded with. Another k needs scores.

    Raises:
        ValueError: what was expected of the file, and what came.
    """
    try:
        with path.open("rb") as file:
            start = file.read(len(MAGIC))
    except OSError as error:
        raise ValueError(f"the trace {path} cannot be read: {error.strerror or error}") from error
    if start != MAGIC and path.suffix in NUMPY:
        return read_arrays(path, k)
    with TraceFile(path) as file:
        if not file.num_steps:
            raise ValueError(f"the trace {path} is empty: it has a header and no steps")
        return _trace_of(path, file, k)


def _trace_of(path: Path, file: TraceFile, k: int | None) -> Trace:
    header, steps = file.header, file.read()
    possible = range(1, header.num_ranked + 1) if header.num_ranked else (header.k,)
    check_k(path, k, tuple(sorted({*possible, header.k})))
    selection, runners_up = _cut(steps, header.k if k is None else k)
    check_distinct(selection, str(path))
    return Trace(path.stem, selection, steps.newest, header.layers, runners_up=runners_up, about=header.about)


def _cut(steps: Steps, k: int) -> tuple[Positions, Positions | None]:
    """The selections with this k, and the k best positions that are not in them, if so many are known."""
    if steps.ranked is None:
        return steps.selection, None
    selection = steps.selection if k == steps.selection.shape[-1] else ascending(steps.ranked[..., :k])
    if steps.ranked.shape[-1] < 2 * k:
        return selection, None
    return selection, _best_of_the_rest(selection, steps.ranked, k)


def _best_of_the_rest(selection: Positions, ranked: Positions, k: int) -> Positions:
    """[steps, lines, k]: of the ranked positions, best first, the first k that are not selected."""
    rest = np.full(selection.shape, -1, np.int32)
    lines = np.arange(selection.shape[1])[:, None]
    is_selected = np.zeros((len(lines), int(max(selection.max(), ranked.max())) + 2), bool)
    for step, (chosen, best) in enumerate(zip(selection, ranked, strict=True)):
        is_selected[:] = False
        is_selected[lines, chosen] = True  # a pad's -1 is the last column, which no position has
        is_selected[:, -1] = True
        others = ~is_selected[lines, best]
        others &= others.cumsum(axis=-1) <= k
        line, entry = np.nonzero(others)
        rest[step, line, others.cumsum(axis=-1)[line, entry] - 1] = best[line, entry]
    return ascending(rest)
