"""`hisparse bench`: measurements, each with what it is compared to."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hisparse.commands import bench_decode, bench_serve
from hisparse.commands.options import CommitOption, JsonLinesOption, JsonOption, PolicyOption, print_json, whole_numbers

if TYPE_CHECKING:
    from hisparse.bench.resolve_setup import Setup

app = typer.Typer(help="Measurements, each with what it is compared to.", no_args_is_help=True)
app.command()(bench_decode.decode)
app.command()(bench_decode.attention)
app.command()(bench_decode.indexer)
app.command()(bench_serve.serve)

TraceOption = Annotated[
    str | None,
    typer.Option(
        "--trace",
        help="low, low-wide or high (generated), or a file: .npy of int32 (steps, batch, k), an .npz with such an "
        "array as 'selection' or 'trace', or a recorded .npz with 'delta'.",
        show_default="low; high with --sweep",
    ),
]
TraceLayerOption = Annotated[
    list[str] | None,
    typer.Option(
        "--trace-layer",
        help="Layers of a recorded trace: one, which every layer gets, or several ('0,9,19'), a layer each.",
    ),
]
ChurnOption = Annotated[float | None, typer.Option(help="Generator: share of a selection replaced each step.")]
StepsOption = Annotated[int | None, typer.Option(help="Generator: steps.")]
KOption = Annotated[int | None, typer.Option("--k", help="Generator: positions in a selection.")]
ContextOption = Annotated[int | None, typer.Option(help="Positions a request has.")]
RequestsOption = Annotated[
    int | None, typer.Option(help="Requests of the trace; one file's selections are tiled to so many.")
]
SeedOption = Annotated[int | None, typer.Option(help="Generator: seed.")]
BatchOption = Annotated[
    list[str] | None,
    typer.Option(
        "--batch",
        help="Batch sizes, a list or repeated; with --sweep the one of the panel over B / k.",
        show_default="of 1,4,16,32,64 what the trace has requests for, and all of them",
    ),
]
BufferOption = Annotated[
    int | None, typer.Option("--buffer", help="B, slots for each request and layer.", show_default="2 * k")
]
RecordBytesOption = Annotated[int, typer.Option("--record-bytes", help="Bytes of a record, a multiple of 16.")]
LayersOption = Annotated[
    int | None, typer.Option("--layers", help="Layers of a step.", show_default="16, or the trace's")
]
WarmStepsOption = Annotated[
    int | None, typer.Option("--warm-steps", help="First steps, not counted.", show_default="a tenth")
]
NoCheckOption = Annotated[bool, typer.Option("--no-check", help="Do not compare every record with its host row.")]
ShuffledOption = Annotated[
    bool, typer.Option("--shuffled-pages", help="Requests' pages lie all over the host pool, as after long use.")
]
ExactOption = Annotated[
    bool, typer.Option("--exact-misses", help="Also count the misses of the specification, on the CPU.")
]
SweepOption = Annotated[
    bool,
    typer.Option("--sweep", help="IO, probe and the rest, over B / k and over the batch; one JSON line a point."),
]
FigureOption = Annotated[Path | None, typer.Option("--figure", help="With --sweep: a .png or .svg to draw.")]


@app.callback()
def bench() -> None:
    """Measurements, each with what it is compared to."""


@app.command()
def reference(
    repeats: Annotated[int, typer.Option(help="Calls to time; the median counts.")] = 15,
    as_json: JsonOption = False,
) -> None:
    """A resolve of [8, 512] on the reference backend against copying the same records."""
    from hisparse.bench.reference import measure

    for row in measure(repeats):
        if as_json:
            print_json(row)
        else:
            print(
                f"{row['case']:6} {row['misses']:5} misses: resolve {row['resolve_ms']:.2f} ms, copy of the selected "
                f"records {row['copy_ms']:.2f} ms, ratio {row['ratio']:.2f}"
            )


@app.command()
def resolve(
    trace: TraceOption = None,
    trace_layer: TraceLayerOption = None,
    churn: ChurnOption = None,
    steps: StepsOption = None,
    k: KOption = None,
    context: ContextOption = None,
    requests: RequestsOption = None,
    seed: SeedOption = None,
    batch: BatchOption = None,
    buffer: BufferOption = None,
    record_bytes: RecordBytesOption = 1152,
    layers: LayersOption = None,
    warm_steps: WarmStepsOption = None,
    policy: PolicyOption = None,
    no_check: NoCheckOption = False,
    shuffled_pages: ShuffledOption = False,
    exact_misses: ExactOption = False,
    sweep: SweepOption = False,
    figure: FigureOption = None,
    commit: CommitOption = None,
    as_json: JsonLinesOption = False,
) -> None:
    """A selection trace replayed through a captured CUDA graph: microseconds a call against a plain copy."""
    from hisparse.bench.resolve_setup import LAYERS, Setup, check_batches, default_batches
    from hisparse.bench.trace import choose_trace

    batches = whole_numbers("--batch", batch)
    _check_sweep(sweep, figure, batches, buffer)
    chosen = choose_trace(
        trace or ("high" if sweep else "low"),
        whole_numbers("--trace-layer", trace_layer),
        churn=churn, steps=steps, k=k, context=context, requests=requests, seed=seed,
    )  # fmt: skip
    setup = Setup(
        trace=chosen,
        buffer=2 * chosen.k if buffer is None else buffer,
        record_bytes=record_bytes,
        warm_steps=chosen.warm_steps if warm_steps is None else warm_steps,
        policy=policy or "lru",
        layers=(chosen.layers if chosen.layers > 1 else LAYERS) if layers is None else layers,
        check=not no_check,
        shuffled_pages=shuffled_pages,
        exact_misses=exact_misses,
        commit=commit,
    )
    check_batches(chosen, batches)
    if sweep:
        _sweep(setup, batches[0] if batches else None, figure)
    else:
        _bench(setup, batches or default_batches(chosen), as_json)


def _bench(setup: "Setup", batches: Sequence[int], as_json: bool) -> None:
    from hisparse.bench.resolve import bench
    from hisparse.bench.resolve_table import heading, line

    _announce(setup, [(setup.buffer, batch) for batch in batches])
    for number, result in enumerate(bench(setup, batches)):
        if as_json:
            print_json(result)
            continue
        if not number:
            print(heading(result))
        print(line(result), flush=True)


def _sweep(setup: "Setup", batch: int | None, figure: Path | None) -> None:
    from hisparse.bench.resolve_sweep import points, sweep
    from hisparse.bench.sweep_figure import check_figure, draw

    if figure is not None:
        check_figure(figure)
    _announce(setup, points(setup.trace, batch))
    lines = []
    for result in sweep(setup, batch):
        lines.append(result)
        print_json(result)
    if figure is not None:
        draw(lines, figure)
        print(f"wrote {figure}", file=sys.stderr)


def _announce(setup: "Setup", points: Iterable[tuple[int, int]]) -> None:
    """Say what is needed, once it is known that there is a GPU to use it."""
    from hisparse.bench.resolve_setup import check_gpu, what_is_needed

    check_gpu()
    print(what_is_needed(setup, points), file=sys.stderr)


def _check_sweep(sweep: bool, figure: Path | None, batches: Sequence[int], buffer: int | None) -> None:
    if figure is not None and not sweep:
        raise ValueError(f"--figure {figure} draws a sweep: add --sweep")
    if sweep and (len(batches) > 1 or buffer is not None):
        raise ValueError(
            "--sweep chooses B and the batches by itself: leave out --buffer, and give at most one --batch, "
            "the one of the panel over B / k"
        )
