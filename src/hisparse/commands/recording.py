"""`hisparse serve --record-traces`: some of a server's requests leave a trace of what their layers selected."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hisparse.commands.progress import say

if TYPE_CHECKING:
    from hisparse.engine import Engine

MOST_STEPS = 4096  # of a request


def check_recording(folder: Path | None, every: int) -> None:
    """Raise `ValueError` for a folder that cannot be written to, or a share that is none."""
    if every < 1:
        raise ValueError(f"--record-every must be at least 1, got {every}")
    if folder is not None and (not folder.is_dir() or not os.access(folder, os.W_OK)):
        raise ValueError(f"--record-traces {folder} is no folder that can be written to: make it first")


@contextmanager
def recording(engine: "Engine", folder: Path | None, every: int) -> Iterator[None]:
    """Record while the body runs; without a folder, nothing."""
    if folder is None:
        yield
        return
    from hisparse.trace.format import SUFFIX
    from hisparse.trace.record import record_traces, stop_recording

    started = time.strftime("%Y%m%d-%H%M%S")
    recorder = record_traces(
        engine,
        lambda number: folder / f"{started}-{number + 1:04}{SUFFIX}",
        every=every,
        max_steps=MOST_STEPS,
        about={"source": "server"},
    )
    try:
        yield
    finally:
        try:
            stop_recording(engine, recorder)
            say(f"recorded {len(recorder.paths)} requests in {folder}")
        except OSError as error:
            say(f"recording in {folder} failed, and its last files may be truncated: {error.strerror or error}")
