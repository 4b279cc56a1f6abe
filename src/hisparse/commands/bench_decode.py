"""`hisparse bench decode`, `attention` and `indexer`: a decode step and its kernels, each against a bound."""

import sys
from typing import Annotated

import typer

from hisparse.commands.options import CommitOption, JsonLinesOption, PolicyOption, print_json, whole_numbers

CHURNS = {"low": 0.13, "high": 0.27}  # about 6.3 and 13.2 % misses at B = 2 k


def decode(
    model: Annotated[str, typer.Option(help="glm-5.2-slice, glm-5.1-slice or deepseek-v3.2-slice.")] = "glm-5.2-slice",
    batch: Annotated[
        list[str] | None, typer.Option(help="Batch sizes, a list or repeated.", show_default="8,16")
    ] = None,
    churn: Annotated[
        list[float] | None,
        typer.Option(help="Share of a selection replaced each step; repeated.", show_default="0.13 and 0.27"),
    ] = None,
    context: Annotated[int, typer.Option(help="Positions of each request before the first step.")] = 32768,
    layers: Annotated[int | None, typer.Option(help="The first ones only.", show_default="all")] = None,
    buffer: Annotated[
        int | None, typer.Option("--buffer", help="B, slots for each request and layer.", show_default="2 * k")
    ] = None,
    other_us: Annotated[float, typer.Option(help="Microseconds that the rest of a layer takes.")] = 300.0,
    early_us: Annotated[
        float, typer.Option(help="Of them, what lies between a layer's indexer and its attention.")
    ] = 20.0,
    steps: Annotated[int, typer.Option(help="Steps that are measured.")] = 30,
    warm_steps: Annotated[int, typer.Option(help="Steps before them.")] = 12,
    rounds: Annotated[int, typer.Option(help="Of all columns; the median counts.")] = 3,
    fp8: Annotated[bool, typer.Option("--fp8", help="Records of 656 bytes.")] = False,
    policy: PolicyOption = None,
    seed: Annotated[int, typer.Option(help="Of selections and contents.")] = 0,
    commit: CommitOption = None,
    as_json: JsonLinesOption = False,
) -> None:
    """Decode steps of a slice of a model: full residency, synchronous, prefetch, oracle; microseconds a layer."""
    from hisparse.bench.decode import bench, heading, line
    from hisparse.bench.decode_setup import DecodeSetup
    from hisparse.bench.resolve_setup import check_gpu

    setups = [
        DecodeSetup(
            model=model, batch=size, context=context, churn=share, steps=steps, warm_steps=warm_steps,
            rounds=rounds, other_us=other_us, early_us=early_us, layers=layers, buffer=buffer, fp8=fp8,
            policy=policy or "lru", seed=seed, commit=commit,
        )
        for size in whole_numbers("--batch", batch) or (8, 16)
        for share in churn or CHURNS.values()
    ]  # fmt: skip
    check_gpu()
    print(max(setups, key=lambda setup: setup.batch).what_is_needed(), file=sys.stderr)
    for number, result in enumerate(bench(setups)):
        if as_json:
            print_json(result)
            continue
        if not number:
            print(heading(result))
        print(line(result), flush=True)


def attention(
    batch: Annotated[list[str] | None, typer.Option(help="Batch sizes.", show_default="1,8,16,32,64")] = None,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 64,
    k: Annotated[int, typer.Option("--k", help="Records that each request reads.")] = 2048,
    commit: CommitOption = None,
    as_json: JsonLinesOption = False,
) -> None:
    """Decode attention over latent records: this project's kernels beside FlashInfer's, if it is installed."""
    from hisparse.bench.attention import bench, line

    for result in bench(whole_numbers("--batch", batch) or (1, 8, 16, 32, 64), heads, k, commit):
        if as_json:
            print_json(result)
        else:
            print(line(result), flush=True)


def indexer(
    batch: Annotated[list[str] | None, typer.Option(help="Batch sizes.", show_default="1,16")] = None,
    context: Annotated[
        list[str] | None, typer.Option(help="Positions of each request.", show_default="32768,131072")
    ] = None,
    heads: Annotated[list[str] | None, typer.Option(help="Index heads.", show_default="32,64")] = None,
    k: Annotated[int, typer.Option("--k", help="Positions that are selected.")] = 2048,
    gb_per_s: Annotated[
        float | None, typer.Option("--gb-per-s", min=1, help="Of the GPU's memory.", show_default="data sheet")
    ] = None,
    commit: CommitOption = None,
    as_json: JsonLinesOption = False,
) -> None:
    """The indexer's scores and top-k against reading its keys once."""
    from hisparse.bench.indexer import bench, line

    batches, contexts = whole_numbers("--batch", batch) or (1, 16), whole_numbers("--context", context)
    counts = whole_numbers("--heads", heads) or (32, 64)
    for result in bench(batches, contexts or (32768, 131072), counts, k, commit, gb_per_s):
        if as_json:
            print_json(result)
        else:
            print(line(result), flush=True)
