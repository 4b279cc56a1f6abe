"""A trace in memory: what the layers of one request selected at every step.

Made by a reader (read.py) of any of the formats, consumed by the simulator, the locality figures and the plots.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int32]


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


def check_distinct(positions: Positions, name: str) -> None:
    """Raise `ValueError` if a line of ascending selections, [steps, lines, k], names a position twice."""
    twice = (positions[..., 1:] == positions[..., :-1]) & (positions[..., 1:] >= 0)
    if twice.any():
        step, line, entry = (int(index) for index in np.argwhere(twice)[0])
        raise ValueError(
            f"the trace {name} must hold distinct positions from 0 on in every selection, got a repeated "
            f"{positions[step, line, entry]} in step {step}, line {line}"
        )
