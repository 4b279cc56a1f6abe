"""Work beside the caller's stream: forked from it, done on a stream of its own, joined by name.

Fork and join are events alone, so that both can be captured in a CUDA graph.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager

import torch


class SideStream:
    """A stream, and what runs on it that the caller's stream has not waited for."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._running: dict[Hashable, tuple[torch.cuda.Event, Sequence[object]]] = {}

    @contextmanager
    def fork(self, name: Hashable, keep: Sequence[object] = ()) -> Iterator[None]:
        """What is launched inside runs here, after all that the caller's stream was given so far.

        Args:
            name: for `join`.
            keep: tensors that it reads, or what holds them: their memory is not given to others before the join.
        """
        self.join(name)  # what still runs under this name keeps its tensors until then
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._running[name] = (self._stream.record_event(), keep)

    def join(self, name: Hashable) -> None:
        """The caller's stream goes on only after the work of that name, if there is any."""
        if name in self._running:
            event, _ = self._running.pop(name)
            torch.cuda.current_stream(self._stream.device).wait_event(event)

    def forget(self) -> None:
        """Nobody will join what was forked: its capture failed."""
        self._running.clear()

    def join_all(self) -> None:
        """Join everything."""
        for name in list(self._running):
            self.join(name)
