"""The figures in bench/results/resolve-h200.jsonl: `python -m hisparse.bench.resolve_figures > resolve-h200.jsonl`.

Takes a GPU, 16 GB of free host memory and some minutes, most of them to make the traces.
"""

import json
from collections.abc import Iterator
from typing import Any

from hisparse.bench.resolve import Setup, bench
from hisparse.bench.synth import SETTINGS

# trace, batch sizes, B, record bytes, layers, check every record
FIGURES = (
    ("low", (1, 4, 16), 4096, 1152, 16, True),
    ("low-wide", (32, 64), 4096, 1152, 16, True),
    ("high", (1, 4, 16, 32), 4096, 1152, 16, True),
    ("low", (1, 4, 16), 4096, 656, 16, True),
    ("low-wide", (32, 64), 4096, 656, 16, True),
    ("low", (1, 4, 16), 8192, 1152, 16, True),
    ("low", (1, 4, 16), 4096, 1152, 2, False),  # tables that stay in the L2 cache from step to step
    ("low-wide", (32, 64), 4096, 1152, 2, False),
)


def figures() -> Iterator[dict[str, Any]]:
    """One result a trace, size and batch."""
    traces = {name: setting.make() for name, setting in SETTINGS.items()}
    for name, batches, buffer, record_bytes, layers, check in FIGURES:
        setting = SETTINGS[name]
        setup = Setup(
            trace=traces[name],
            context=setting.context,
            buffer=buffer,
            record_bytes=record_bytes,
            warm_steps=setting.warm_steps,
            layers=layers,
            check=check,
        )
        for result in bench(setup, batches):
            yield {"trace": name, **result}


if __name__ == "__main__":
    for line in figures():
        print(json.dumps(line), flush=True)
