"""The figures in bench/results/resolve-h200.jsonl:

    python -m hisparse.bench.resolve_figures [TRACES] [--commit TEXT] > resolve-h200.jsonl

TRACES is the folder of the recorded traces; with it, lines of `"kind": "misses"` hold the misses of real
selections against the specification. Takes a GPU, 16 GB of free host memory and some minutes, most of them to
make the generated traces.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hisparse.bench.resolve import bench
from hisparse.bench.resolve_setup import Setup, check_gpu
from hisparse.bench.synth import SETTINGS
from hisparse.bench.trace import from_file, generated


class Figure(NamedTuple):
    """What one call of the bench measures."""

    trace: str
    batches: tuple[int, ...]
    buffer: int = 4096
    record_bytes: int = 1152
    layers: int = 16
    check: bool = True
    shuffled_pages: bool = False
    own_ranges: bool = False
    followers: int = 0
    lines: int = 1


FIGURES = (
    Figure("low", (1, 4, 16)),
    Figure("low-wide", (32, 64)),
    Figure("high", (1, 4, 16, 32)),
    Figure("low", (1, 4, 16), record_bytes=656),
    Figure("low-wide", (32, 64), record_bytes=656),
    Figure("low", (1, 4, 16), buffer=8192),
    Figure("low", (1, 4, 16), layers=2, check=False),  # tables that stay in the L2 cache from step to step
    Figure("low-wide", (32, 64), layers=2, check=False),
    Figure("low-wide", (32, 64), shuffled_pages=True),
    Figure("low-wide", (32, 64), record_bytes=656, shuffled_pages=True),
    Figure("low", (1, 16), layers=8, own_ranges=True),
    Figure("low-wide", (64,), layers=8, own_ranges=True),
    Figure("low", (1, 16), record_bytes=656, layers=8, own_ranges=True, shuffled_pages=True),
    Figure("low", (1, 4, 16), layers=2, own_ranges=True, followers=3),
    Figure("low", (1, 4, 16), record_bytes=656, layers=2, own_ranges=True, followers=3),
    Figure("low", (2, 8, 32), lines=2),
    Figure("low", (4, 16, 64), lines=4),
    Figure("low", (1, 4, 16), buffer=2049),  # near B = k, claims pass over many slots that the step used
    Figure("low", (1, 4, 16), buffer=2304),
)
RECORDED_TRACES = ("austen_tf", "code_tf", "code_gen")
RECORDED_LAYERS = (0, 9, 19, 29)
RECORDED_BUFFERS = (161, 240, 320)  # k + 1, 1.5 k, 2 k
RECORDED_REQUESTS = 8


def figures(commit: str | None = None) -> Iterator[dict[str, Any]]:
    """One result a generated trace, size and batch."""
    traces = {name: generated(name, setting) for name, setting in SETTINGS.items()}
    for figure in FIGURES:
        trace = traces[figure.trace].with_lines(figure.lines)
        setup = Setup(
            trace=trace,
            buffer=figure.buffer,
            record_bytes=figure.record_bytes,
            warm_steps=trace.warm_steps,
            layers=figure.layers,
            check=figure.check,
            shuffled_pages=figure.shuffled_pages,
            own_ranges=figure.own_ranges,
            followers=figure.followers,
            commit=commit,
        )
        yield from bench(setup, figure.batches)


def misses_of_real_traces(folder: Path, commit: str | None = None) -> Iterator[dict[str, Any]]:
    """One result a recorded trace and B, all steps counted from an empty pool on."""
    for name in RECORDED_TRACES:
        trace = from_file(folder / f"{name}.npz", RECORDED_LAYERS, RECORDED_REQUESTS)
        for buffer in RECORDED_BUFFERS:
            setup = Setup(
                trace=trace,
                buffer=buffer,
                record_bytes=1152,
                warm_steps=0,
                layers=len(RECORDED_LAYERS),
                exact_misses=True,
                commit=commit,
            )
            for result in bench(setup, (RECORDED_REQUESTS,)):
                yield {"kind": "misses", **result}


def main() -> None:
    """Print one JSON line a result."""
    parser = argparse.ArgumentParser(description="All committed figures of resolve, one JSON line a result.")
    parser.add_argument("traces", nargs="?", type=Path, help="the folder of the recorded traces")
    parser.add_argument("--commit", help="the commit to name, where there is no git history")
    given = parser.parse_args()
    check_gpu()
    for result in figures(given.commit):
        print(json.dumps(result), flush=True)
    if given.traces is not None:
        for result in misses_of_real_traces(given.traces, given.commit):
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
