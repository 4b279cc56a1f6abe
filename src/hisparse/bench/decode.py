"""Time whole decode steps on the GPU: all records resident, the cache with and without prefetch, and no IO at all.

Every column runs the same layers (decode_layers.py), captured once in a CUDA graph and replayed for each step of a
trace; a step's time is that of its replay. What attention reads is compared bit for bit with the resident column.
IO that a scheme exposes is its time above the oracle's, which moves the tables and no record. Columns are measured in
rounds, because clocks drift by as much as some schemes expose; the median round counts.
"""

import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hisparse.bench.decode_layers import Layers
from hisparse.bench.decode_setup import COLUMNS, DecodeSetup
from hisparse.bench.decode_stores import Hierarchy, Resident
from hisparse.bench.provenance import provenance
from hisparse.bench.resolve_setup import check_gpu
from hisparse.cache import HierarchicalCache
from hisparse.errors import HiSparseError
from hisparse.host_pool import HostPool

SCHEMES = ("synchronous", "prefetch", "early")  # that expose IO


def bench(setups: Sequence[DecodeSetup]) -> Iterator[dict[str, Any]]:
    """One result a setup.

    Raises:
        BuildError: no GPU, or no NVRTC.
        HiSparseError: attention read another record than the resident column.
    """
    check_gpu()
    host: HostPool | None = None
    for setup in setups:
        layout = setup.layout()
        if host is None or list(host.records.shape) != [layout.num_layers, layout.num_rows, layout.record_bytes]:
            host = None  # the old one's memory is free before the new one's is taken
            host = HostPool(layout, pinned=True)
        yield measure(setup, host)


def measure(setup: DecodeSetup, host: HostPool) -> dict[str, Any]:
    """All columns of one setup."""
    torch.manual_seed(setup.seed)
    selections = torch.from_numpy(setup.trace.make()).sort(dim=-1).values.cuda()
    layers, resident = Layers(setup), Resident(setup)
    times: dict[str, list[float]] = {column: [] for column in COLUMNS}
    misses = 0
    for _ in range(setup.rounds):
        times["full"].append(time_steps(setup, layers, selections, resident))
        want = layers.out.clone()
        for column in COLUMNS[1:]:
            us, misses = _time_cache(setup, host, layers, selections, resident, column)
            times[column].append(us)
            if column != "oracle" and not torch.equal(layers.out, want):
                raise HiSparseError(f"{column}: attention read another record than the resident column")
    medians = {column: statistics.median(rounds) for column, rounds in times.items()}
    rounds = {f"us_rounds_{column}": [round(us, 1) for us in each] for column, each in times.items()}
    return {**_describe(setup, layers.other.us), **_fields(setup, medians, misses), **rounds}


def _time_cache(
    setup: DecodeSetup, host: HostPool, layers: Layers, selections: Tensor, resident: Resident, column: str
) -> tuple[float, int]:
    """Microseconds of a step, and misses of all that count."""
    cache = HierarchicalCache(
        setup.layout(), device="cuda", policy=setup.policy, prefetch=column != "synchronous", io=column != "oracle",
        host_pool=host,
    )  # fmt: skip
    store = Hierarchy(setup, cache, resident, early=column == "early")
    us, misses = time_steps(setup, layers, selections, store), store.misses
    store.retire()
    return us, misses


def time_steps(
    setup: DecodeSetup,
    layers: Layers,
    selections: Tensor,  # int32 [steps, b, k - 1], ascending
    store: Resident | Hierarchy,
) -> float:
    """Microseconds of a step, the median of the counted ones."""
    store.capture(layers)
    times = []
    for number, selection in enumerate(selections):
        if number == setup.warm_steps:
            store.begin_counting()
        times.append(store.step(partial(layers.select, selection, setup.context + number)))
    return statistics.median(times[setup.warm_steps :])


def _fields(setup: DecodeSetup, times: dict[str, float], misses: int) -> dict[str, Any]:
    exposed = {column: times[column] - times["oracle"] for column in SCHEMES}
    a_layer = misses / (setup.steps * setup.num_layers)
    return {
        "misses": round(a_layer, 1),
        "miss_rate": round(a_layer / (setup.batch * setup.slice.top_k), 4),
        **{f"us_{column}": round(us, 1) for column, us in times.items()},
        **{f"us_a_layer_{column}": round(us / setup.num_layers, 2) for column, us in times.items()},
        **{f"exposed_us_a_layer_{column}": round(us / setup.num_layers, 2) for column, us in exposed.items()},
        **{f"exposed_share_{column}": _share(exposed[column], exposed["synchronous"]) for column in SCHEMES[1:]},
        "overhead": round(times["oracle"] / times["full"] - 1, 4),
    }


def _share(part: float, whole: float) -> float | None:
    """None where resolving in line exposes nothing either."""
    return round(part / whole, 3) if whole > 0 else None


def _describe(setup: DecodeSetup, other_us: float) -> dict[str, Any]:
    layout = setup.layout()
    return {
        **provenance(setup.commit),
        "model": setup.model,
        "layers": setup.num_layers,
        "anchors": len(layout.groups),
        "batch": setup.batch,
        "context": setup.context,
        "k": setup.slice.top_k,
        "buffer": layout.device_buffer_size,
        "record_bytes": setup.record_bytes,
        "policy": setup.policy,
        "churn": setup.churn,
        "seed": setup.seed,
        "steps": setup.steps,
        "warm_steps": setup.warm_steps,
        "rounds": setup.rounds,
        "other_us": round(other_us, 1),
        "early_us": round(setup.early_us, 1),
    }


COLUMN_NAMES = ("batch", "miss %", *COLUMNS, "exposed:", *SCHEMES[1:], "of synchr.:", SCHEMES[2])


def heading(result: dict[str, Any]) -> str:
    """What all lines belong to, and the columns' names."""
    return (
        f"{result['device']}, commit {result['commit'] or 'unknown'}: {result['model']}, {result['layers']} layers, "
        f"{result['anchors']} of them anchors, k {result['k']}, B {result['buffer']}, {result['policy']}, "
        f"{result['record_bytes']} B records, context {result['context']}, {result['other_us']} us of other work a "
        f"layer. Microseconds a layer:\n" + "  ".join(name.rjust(12) for name in COLUMN_NAMES)
    )


def line(result: dict[str, Any]) -> str:
    """One result."""
    cells = [
        str(result["batch"]),
        f"{100 * result['miss_rate']:.2f}",
        *(f"{result[f'us_a_layer_{column}']:.1f}" for column in COLUMNS),
        *(f"{result[f'exposed_us_a_layer_{column}']:.1f}" for column in SCHEMES),
        *(_percent(result[f"exposed_share_{column}"]) for column in SCHEMES[1:]),
    ]
    return "  ".join(cell.rjust(12) for cell in cells)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"
