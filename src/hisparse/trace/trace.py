"""A trace in memory: what the layers of one request selected at every step.

Made by a reader (read.py) of any of the formats, consumed by the simulator, the locality figures and the plots.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int32]

MOST_POSITIONS = 1 << 24  # of a trace: higher ones are refused where a file is read


@dataclass(frozen=True, eq=False)
class Trace:
    """Selections over steps.

    A line is what selects for itself: a layer of a recorded request, or a request of a generated trace.
    """

    name: str
    selection: Positions  # [steps, lines, k], ascending and distinct, then -1 pads
    newest: Positions  # [steps]: the position that the step produces, which is never fetched; -1: none
    lines: tuple[int, ...]  # the number of each line's layer (or request)
    line_name: str = "layer"
    runners_up: Positions | None = None  # [steps, lines, k]: ranks k + 1 to 2k, -1 pads; None: without scores
    about: Mapping[str, object] = field(default_factory=dict)  # model, selector, context, source, ...

    @property
    def num_steps(self) -> int:
        """Decode steps."""
        return int(self.selection.shape[0])

    @property
    def num_lines(self) -> int:
        """Layers, or requests."""
        return int(self.selection.shape[1])

    @property
    def k(self) -> int:
        """The most positions in a selection."""
        return int(self.selection.shape[2])

    @cached_property
    def num_positions(self) -> int:
        """One more than the highest position that occurs."""
        parts = [self.selection, self.newest] + ([] if self.runners_up is None else [self.runners_up])
        return max(int(part.max(initial=0)) for part in parts) + 1

    @cached_property
    def occurring(self) -> NDArray[np.int64]:
        """The positions that occur, ascending: what is kept for each position is kept for these alone."""
        occurs = np.zeros(self.num_positions + 1, bool)  # a pad's -1 is the last entry
        for part in (self.selection, self.newest, self.runners_up):
            if part is not None:
                occurs[part] = True
        return np.flatnonzero(occurs[:-1])

    @property
    def spans(self) -> str:
        """The lines in words: '0 to 29', or every number if they do not follow each other."""
        if len(self.lines) > 2 and self.lines == tuple(range(self.lines[0], self.lines[-1] + 1)):
            return f"{self.lines[0]} to {self.lines[-1]}"
        return ", ".join(map(str, self.lines))

    def of_lines(self, wanted: tuple[int, ...]) -> "Trace":
        """Some layers alone. Raises `ValueError` for one that the trace does not have."""
        missing = [line for line in wanted if line not in self.lines]
        if missing:
            raise ValueError(
                f"the trace {self.name} has {self.line_name}s {self.spans}, got {', '.join(map(str, missing))}"
            )
        chosen = [self.lines.index(line) for line in wanted]
        runners_up = None if self.runners_up is None else self.runners_up[:, chosen]
        return replace(self, selection=self.selection[:, chosen], lines=wanted, runners_up=runners_up)


def ascending(positions: NDArray[np.integer]) -> Positions:
    """Positions sorted along the last axis, -1 pads moved to the end."""
    last = np.iinfo(np.int32).max
    ordered = np.sort(np.where(positions < 0, last, positions).astype(np.int32), axis=-1)
    return np.where(ordered == last, -1, ordered).astype(np.int32)


def is_whole(value: object, least: int, most: int = 2**31 - 1) -> TypeGuard[int]:
    """Whether a value of a file is a whole number from `least` to `most`; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def check_positions(
    field: str, positions: NDArray[np.integer], newest: Positions, line_name: str = "layer", *, pads: bool = True
) -> None:
    """Positions of a file are not beyond the step's newest, nor `MOST_POSITIONS`.

    Args:
        field: "'pos' of the trace FILE", for the message.
        positions: [steps, lines, n], in any order.
        newest: [steps], -1: not known.
        line_name: of the trace.
        pads: whether -1 stands for no position.

    Raises:
        ValueError: the first position that is.
    """
    last = np.where(newest < 0, MOST_POSITIONS - 1, newest)[:, None, None]
    for what, wrong in (("a negative", positions < (-1 if pads else 0)), ("a later", positions > last)):
        if wrong.any():
            step, line, entry = (int(index) for index in np.argwhere(wrong)[0])
            raise ValueError(
                f"{field} must hold positions from 0 to the newest, {last[step, 0, 0]} at most, "
                f"got {what} {positions[step, line, entry]} in step {step}, {line_name} {line}"
            )


def check_distinct(field: str, positions: NDArray[np.integer], line_name: str = "layer") -> None:
    """Raise `ValueError` if a line of positions, [steps, lines, n] in any order, names one twice; -1 is none."""
    ordered = np.sort(positions, axis=-1)
    repeated = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    if repeated.any():
        step, line, entry = (int(index) for index in np.argwhere(repeated)[0])
        raise ValueError(
            f"{field} must hold distinct positions in every line, "
            f"got a repeated {ordered[step, line, entry]} in step {step}, {line_name} {line}"
        )


def check_scores(field: str, scores: NDArray[Any], ranked: NDArray[np.integer]) -> None:
    """Raise `ValueError` unless scores, [steps, lines, ranks], descend with the positions that they are of."""
    rises = scores[..., 1:] > scores[..., :-1]
    for what, found in (("nan", np.isnan(scores)), ("an ascent", np.pad(rises, ((0, 0), (0, 0), (1, 0))))):
        wrong = found & (ranked >= 0)
        if wrong.any():
            step, line, rank = (int(index) for index in np.argwhere(wrong)[0])
            raise ValueError(f"{field} must descend in every line, got {what} in step {step}, line {line}, rank {rank}")
