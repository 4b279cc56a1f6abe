"""Progress on standard error: a live bar in a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

LINE_SECONDS = 10.0  # between lines where there is no terminal

console = Console(stderr=True, highlight=False)


class Bar:
    """Counts up to a total."""

    def __init__(self, title: str, total: int, progress: Progress | None) -> None:
        self._title, self._total, self._progress = title, total, progress
        self._task = progress.add_task(title, total=total) if progress is not None else None
        self._done = 0
        self._last_line = time.monotonic()

    def advance(self, count: int) -> None:
        """Count on."""
        self._done += count
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=self._done)
        elif count and time.monotonic() - self._last_line > LINE_SECONDS:
            self._last_line = time.monotonic()
            print(f"{self._title}: {self._done} of {self._total}", file=sys.stderr, flush=True)


@contextmanager
def bars() -> Iterator["Bars"]:
    """A group of bars that are drawn together."""
    if not console.is_terminal:
        yield Bars(None)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield Bars(progress)


class Bars:
    """Makes bars."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress

    def bar(self, title: str, total: int) -> Bar:
        """A new bar."""
        return Bar(title, total, self._progress)

    def amounts(self, title: str, unit: int) -> Callable[[int, int], None]:
        """Shows (amount done, amount in all), in units, from its first call on."""
        bar: Bar | None = None
        shown = 0

        def report(done: int, total: int) -> None:
            nonlocal bar, shown
            bar = bar or self.bar(title, total // unit)
            bar.advance(done // unit - shown)
            shown = done // unit

        return report


def say(message: str) -> None:
    """A line about what is going on."""
    console.print(message, style="dim", markup=False)


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Say what is being done, with a spinner in a terminal, and how long it took."""
    start = time.monotonic()
    if console.is_terminal:
        with console.status(f"{what} ..."):
            yield
    else:
        print(f"{what} ...", file=sys.stderr, flush=True)
        yield
    console.print(f"{what}: done in {time.monotonic() - start:.1f} s", style="dim", markup=False)
