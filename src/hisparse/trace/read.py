"""One reader for every kind of trace file: the project's own (format.py) and NumPy's (arrays.py)."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hisparse.trace.arrays import check_k, read_arrays
from hisparse.trace.file import TraceFile
from hisparse.trace.format import MAGIC, Steps
from hisparse.trace.trace import (
    MOST_POSITIONS,
    Positions,
    Trace,
    ascending,
    check_distinct,
    check_positions,
    check_scores,
    is_whole,
)

NUMPY = (b"PK", b"\x93NUMPY")  # that .npz and .npy begin with
SUFFIXES = (".npy", ".npz")
REPORT = b"{"


def open_trace(path: Path, k: int | None = None) -> Trace:
    """A file's trace, told by its content.

    Args:
        path: a trace file of `hisparse trace record`, or a .npy or .npz (see arrays.py).
        k: positions of a selection to take; default: what the trace was recorded with. Another k needs scores.

    Raises:
        ValueError: what was expected of the file, and what came.
    """
    start = _start(path)
    if start.lstrip().startswith(REPORT):
        raise ValueError(f"{path} is no trace but JSON: a report is drawn with `hisparse trace plot`")
    is_numpy = start.startswith(NUMPY) or (start != MAGIC and path.suffix in SUFFIXES)  # those say what a broken one is
    trace = read_arrays(path, k) if is_numpy else _read_own(path, k)
    record_bytes = trace.about.get("record_bytes", 1)
    if not is_whole(record_bytes, 1):
        raise ValueError(f"'record_bytes' of the trace {path} must be a whole number from 1 on, got {record_bytes!r}")
    return trace


def is_report(path: Path) -> bool:
    """Whether a file is a report and not a trace, told by its content. Raises `ValueError` if it cannot be read."""
    return _start(path).lstrip().startswith(REPORT)


def _start(path: Path) -> bytes:
    """A file's first bytes, as many as `MAGIC` has."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC))
    except OSError as error:
        raise ValueError(f"the trace {path} cannot be read: {error.strerror or error}") from error


def _read_own(path: Path, k: int | None) -> Trace:
    with TraceFile(path) as file:
        if not file.num_steps:
            raise ValueError(f"the trace {path} is empty: it has a header and no steps")
        header, steps = file.header, file.read()
    possible = range(1, header.num_ranked + 1) if header.num_ranked else (header.k,)
    check_k(path, k, tuple(sorted({*possible, header.k})))
    _check_steps(path, steps)
    selection, runners_up = _cut(steps, header.k if k is None else k)
    return Trace(path.stem, selection, steps.newest, header.layers, runners_up=runners_up, about=header.about)


def _check_steps(path: Path, steps: Steps) -> None:
    """Raise `ValueError` for steps that no request can have made."""
    newest = steps.newest
    wrong = (newest <= np.append(-1, newest[:-1])) | (newest >= MOST_POSITIONS)
    if wrong.any():
        step = int(wrong.argmax())
        raise ValueError(
            f"'newest' of the trace {path} must ascend, from 0 to at most {MOST_POSITIONS - 1}, got {newest[step]} in "
            f"step {step}{f' after {newest[step - 1]}' if step else ''}: a file holds the steps of one request"
        )
    for name, positions in (("selection", steps.selection), ("ranked", steps.ranked)):
        if positions is not None:
            check_positions(f"{name!r} of the trace {path}", positions, newest)
            check_distinct(f"{name!r} of the trace {path}", positions)
    if steps.ranked is not None and steps.scores is not None:
        check_scores(f"'scores' of the trace {path}", steps.scores, steps.ranked)
        _check_ranks_hold_selection(path, steps.selection, steps.ranked, steps.scores)


def _check_ranks_hold_selection(
    path: Path, selection: Positions, ranked: Positions, scores: NDArray[np.float16]
) -> None:
    """Raise `ValueError` if a selected position is not ranked, unless it can have tied with the last that is."""
    counts = (selection >= 0).sum(axis=-1)
    num_found = _is_among(ranked, selection).sum(axis=-1)
    worst = np.take_along_axis(scores, (counts - 1).clip(min=0)[..., None], axis=-1)[..., 0]
    wrong = (num_found < counts) & ((worst > scores[..., -1]) | (ranked[..., -1] < 0))
    if wrong.any():
        step, line = (int(index) for index in np.argwhere(wrong)[0])
        raise ValueError(
            f"'ranked' of the trace {path} must hold what the step selects, and holds {num_found[step, line]} of "
            f"{counts[step, line]} positions in step {step}, layer {line}"
        )


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
    others = (ranked >= 0) & ~_is_among(ranked, selection)
    others &= others.cumsum(axis=-1, dtype=np.int32) <= k
    return ascending(np.where(others, ranked, -1))[..., :k]


def _is_among(ranked: Positions, selection: Positions) -> NDArray[np.bool_]:
    """[steps, lines, ranks]: whether the line selects the ranked position in this step."""
    lines = np.arange(selection.shape[1])[:, None]
    is_selected = np.zeros((len(lines), int(max(selection.max(), ranked.max())) + 2), bool)  # -1 is the last column
    found = np.empty(ranked.shape, bool)
    for step, (best, chosen) in enumerate(zip(ranked, selection, strict=True)):
        is_selected[lines, chosen] = True
        found[step] = is_selected[lines, best]
        is_selected[lines, chosen] = False
    return found & (ranked >= 0)
