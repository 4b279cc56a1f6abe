"""The selections that a bench replays: generated, or read from a file (trace_file.py).

A trace's sizes are known before its selections are, so that everything else can be checked before the minutes
that a large generated trace takes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hisparse.bench.synth import SETTINGS, Setting
from hisparse.bench.trace_file import read_trace

SUFFIXES = (".npy", ".npz", ".hst")

Selections = NDArray[np.int32]  # [steps, layers, batch, k] positions; layers is 1 where all layers select the same


@dataclass(frozen=True, eq=False)
class SelectionTrace:
    """Selections of some requests over some steps."""

    name: str
    steps: int
    layers: int  # 1: every layer of the bench gets the same selection
    batch: int
    k: int
    context: int  # positions a request has
    make: Callable[[], Selections]
    about: Mapping[str, object]  # what else tells it from others, for a result's line
    lines: int = 1  # of each request in a step

    @property
    def warm_steps(self) -> int:
        """The usual share of a trace that is not counted: a tenth."""
        return self.steps // 10

    def with_lines(self, lines: int) -> "SelectionTrace":
        """The same selections, so many steps of each request at once: `batch` counts lines from then on."""

        def make() -> Selections:
            steps = self.steps // lines
            shape = (steps, lines, self.layers, self.batch, self.k)
            together = self.selections[: steps * lines].reshape(shape).transpose(0, 2, 3, 1, 4)
            return together.reshape(steps, self.layers, self.batch * lines, self.k)

        return replace(self, steps=self.steps // lines, batch=self.batch * lines, make=make, lines=lines)

    @cached_property
    def selections(self) -> Selections:
        """int32 [steps, layers, batch, k]; made when first read. Ascending, as selectors hand selections over."""
        return np.sort(self.make(), axis=-1)


def generated(name: str, setting: Setting) -> SelectionTrace:
    """A trace of the generator.

    Raises:
        ValueError: the setting cannot be made.
    """
    setting.check()
    about = {"churn": setting.churn, "seed": setting.seed}
    return SelectionTrace(
        name, setting.steps, 1, setting.batch, setting.k, setting.context, lambda: setting.make()[:, None], about
    )


def from_file(
    path: Path, layers: tuple[int, ...] = (), requests: int | None = None, context: int | None = None
) -> SelectionTrace:
    """A trace of a file, already read and checked.

    Args:
        path: see `read_trace`.
        layers: of a recorded trace, which ones to replay; several become the layers of the bench.
        requests: how many requests make the one of the file's selections, each of rows of its own.
        context: positions a request has. Default: up to the highest one that is selected.

    Raises:
        ValueError: the file is not such a trace, or the options do not fit it.
    """
    found = read_trace(path, layers)
    num_steps, num_layers, batch, k = found.shape
    if requests is not None and (requests < 1 or batch not in (1, requests)):
        raise ValueError(
            f"requests must be {batch}, those of {path}, or for selections of one request any number from 1 on, "
            f"got {requests}"
        )
    needed = int(found.max()) + 1
    if context is not None and context < needed:
        raise ValueError(f"context must hold every selected position of {path}: at least {needed}, got {context}")
    tiled = np.broadcast_to(found, (num_steps, num_layers, requests or batch, k))
    about = {"trace_layers": list(layers)} if layers else {}
    return SelectionTrace(
        path.stem, num_steps, num_layers, requests or batch, k, context or needed, lambda: tiled, about
    )


def choose_trace(
    trace: str,
    layers: tuple[int, ...] = (),
    *,
    churn: float | None = None,
    steps: int | None = None,
    k: int | None = None,
    context: int | None = None,
    requests: int | None = None,
    seed: int | None = None,
) -> SelectionTrace:
    """The trace that a command line means.

    Args:
        trace: a name in `SETTINGS`, which the other arguments may change, or a file.
        layers: of a recorded trace.
        churn, steps, k, context, requests, seed: of the generator; a file takes `context` and `requests` alone.

    Raises:
        ValueError: there is no such trace, or an argument does not fit it.
    """
    made = {"churn": churn, "steps": steps, "k": k, "seed": seed}
    given: dict[str, Any] = {name: value for name, value in made.items() if value is not None}
    if trace not in SETTINGS:
        if Path(trace).suffix not in SUFFIXES:
            raise ValueError(f"--trace must be {', '.join(SETTINGS)}, or a {' or '.join(SUFFIXES)} file, got {trace!r}")
        if given:
            raise ValueError(f"--{next(iter(given))} is for a generated trace, and {trace} is a file")
        return from_file(Path(trace), layers, requests, context)
    if layers:
        raise ValueError(f"--trace-layer is for a recorded trace (an .npz with 'delta'), and {trace!r} is generated")
    sizes = {"context": context, "batch": requests}
    given |= {name: value for name, value in sizes.items() if value is not None}
    setting = SETTINGS[trace]._replace(**given)
    return generated(trace if setting == SETTINGS[trace] else "generated", setting)
