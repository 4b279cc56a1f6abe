"""`hisparse trace`: record what layers select, replay it under policies, and draw it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hisparse.commands.options import (
    BufferOption,
    ChatOption,
    ConfigOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    MaxTokensOption,
    ModelArgument,
    PromptFileOption,
    PromptOption,
    TopKOption,
    build_config,
    print_json,
    read_prompts,
)
from hisparse.commands.session import load_model, prepare, tokenize

if TYPE_CHECKING:
    from hisparse.trace.trace import Trace

app = typer.Typer(help="Selection traces: record, simulate, plot.", no_args_is_help=True)

DEFAULT_POLICIES = "lru,fifo,two_rate,belady"
DEFAULT_SIZES = "1k,2k,4k"
SIMULATION = ("k", "sizes", "policies", "skip", "layers", "workers")  # options of `plot` that a report has no use for
RANKED = 4  # times k: the best positions that are kept with their scores

FileArgument = Annotated[
    Path, typer.Argument(metavar="FILE", help="A trace: of `hisparse trace record`, a .npz or a .npy.")
]
KOption = Annotated[
    int | None,
    typer.Option(
        "--k", help="Positions of a selection; another than recorded needs scores.", show_default="as recorded"
    ),
]
SizesOption = Annotated[str, typer.Option("--sizes", help="B of each run: numbers, or multiples of k such as 2k.")]
PoliciesOption = Annotated[
    str,
    typer.Option(
        "--policies",
        help="Who leaves first: lru, lru_paper, fifo, random, clock, sieve, s3_fifo, lfu, lru_2, lrfu, lrfu_resident, "
        "two_rate, two_rate_tier, two_rate_resident, two_rate_resident_tier, belady; or 'all'.",
    ),
]
SkipOption = Annotated[int, typer.Option("--skip", help="First steps, simulated but not counted.")]
LayersOption = Annotated[
    str | None, typer.Option("--layers", help="Some layers of the trace, '0,9,19' for instance.", show_default="all")
]
RecordBytesOption = Annotated[
    int | None, typer.Option("--record-bytes", help="Bytes of a record.", show_default="the trace's, or 1152")
]
WorkersOption = Annotated[int | None, typer.Option("--workers", help="Processes.", show_default="one a core")]
SeedOption = Annotated[int, typer.Option("--seed", help="Of the order in which records of one step enter.")]


@app.callback()
def trace() -> None:
    """Selection traces: record, simulate, plot."""


@app.command()
def simulate(
    file: FileArgument,
    k: KOption = None,
    sizes: SizesOption = DEFAULT_SIZES,
    policies: PoliciesOption = DEFAULT_POLICIES,
    skip: SkipOption = 0,
    layers: LayersOption = None,
    record_bytes: RecordBytesOption = None,
    workers: WorkersOption = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Miss rates of policies and sizes over a recorded trace.

    Example: hisparse trace simulate trace.hst --sizes 1k,2k,4k --policies lru,two_rate,belady --skip 100
    """
    report = _simulate(file, k, sizes, policies, skip, layers, record_bytes, workers, seed)
    if as_json:
        print_json(report)
    else:
        _print_report(report)


@app.command()
def record(
    model: ModelArgument,
    out: Annotated[Path, typer.Option("--out", "-o", help="The trace's file; of a second prompt FILE-2.hst.")],
    prompt: PromptOption = None,
    prompt_file: PromptFileOption = None,
    max_tokens: MaxTokensOption = 128,
    top_k: TopKOption = None,
    device_buffer_size: BufferOption = None,
    selector: Annotated[
        str | None,
        typer.Option("--selector", help="As of `generate`.", show_default="the model's indexer, or attention_mass"),
    ] = None,
    scores: Annotated[
        bool | None,
        typer.Option(
            "--scores/--no-scores",
            help="Keep the best 4k positions with their scores.",
            show_default="if the selector gives them",
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token; above 0 samples.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Of the random stream.")] = None,
    ignore_stop: Annotated[bool, typer.Option("--ignore-stop", help="Go on after a stop token.")] = False,
    chat: ChatOption = None,
    hisparse_config: ConfigOption = None,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "cpu",
) -> None:
    """Generate, and record what every layer selects at every decode step.

    Example: hisparse trace record smollm2 --prompt-file book.txt --top-k 160 --max-tokens 600 --out book.hst
    """
    from dataclasses import replace

    from hisparse.engine import SamplingParams
    from hisparse.models import Llama
    from hisparse.trace.record import numbered, record_traces, stop_recording

    keys = {"top_k": top_k, "device_buffer_size": device_buffer_size, "selector": selector}
    config = build_config(hisparse_config, **keys)
    _check_new(out)
    texts = read_prompts(prompt, prompt_file)
    loaded = load_model(model, dtype, device)
    if config.selector == "auto" and isinstance(loaded.model, Llama):
        config = replace(config, selector="attention_mass")
    params = SamplingParams(temperature, seed=seed, max_tokens=max_tokens, ignore_eos=ignore_stop)
    session = prepare(loaded, config, tokenize(loaded, texts, chat), params)
    keep = config.selector == "attention_mass" if scores is None else scores
    num_ranked = RANKED * session.engine.runner.cache.layout.top_k if keep else 0
    recorder = record_traces(session.engine, numbered(out), num_ranked=num_ranked, about={"source": loaded.name})
    try:
        session.run()
    finally:
        stop_recording(session.engine, recorder)
    if not recorder.paths:
        raise ValueError("nothing was recorded: every answer ended with its first token, before a decode step")
    for path in recorder.paths:
        print(path)


@app.command()
def plot(
    context: typer.Context,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A trace, or what `hisparse trace simulate --json` printed of one.")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", help="Prefix of the figures' files.", show_default="FILE without its suffix")
    ] = None,
    formats: Annotated[str, typer.Option("--format", help="png, svg, or both.")] = "png,svg",
    size: Annotated[
        int | None, typer.Option("--size", help="B where a figure shows one.", show_default="2k, or the first")
    ] = None,
    k: KOption = None,
    sizes: SizesOption = DEFAULT_SIZES,
    policies: PoliciesOption = DEFAULT_POLICIES,
    skip: SkipOption = 0,
    layers: LayersOption = None,
    workers: WorkersOption = None,
) -> None:
    """Draw misses over steps, over sizes and by layer, and what selections have in common.

    Example: hisparse trace plot trace.hst --out figures/trace --policies lru,fifo,two_rate,belady --skip 100
    """
    from hisparse.trace.plots import check_target, draw_report
    from hisparse.trace.read import is_report
    from hisparse.trace.report import read_report

    prefix = out or file.with_suffix("")
    wanted = tuple(word.strip() for word in formats.split(","))
    check_target(prefix, wanted)
    if is_report(file):
        _check_nothing_to_simulate(context, file)
        report = read_report(file)
    else:
        report = _simulate(file, k, sizes, policies, skip, layers, None, workers, 0)
    for path in draw_report(report, prefix, wanted, size):
        print(path)


def _check_nothing_to_simulate(context: typer.Context, file: Path) -> None:
    """Raise `ValueError` for options that a report cannot follow: it was simulated already."""
    sources = {name: context.get_parameter_source(name) for name in SIMULATION}
    given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if given:
        raise ValueError(
            f"{', '.join(f'--{name}' for name in given)} are for a trace, and {file} is a report: "
            f"leave them out, or simulate the trace with them"
        )


def _simulate(
    file: Path,
    k: int | None,
    sizes: str,
    policies: str,
    skip: int,
    layers: str | None,
    record_bytes: int | None,
    workers: int | None,
    seed: int,
) -> dict[str, Any]:
    from hisparse.trace.read import open_trace
    from hisparse.trace.report import make_report
    from hisparse.trace.sweep import RECORD_BYTES, Sweep

    if workers is not None and workers < 1:
        raise ValueError(f"--workers must be at least 1, got {workers}")
    for name, value, least in (("--record-bytes", record_bytes, 1), ("--seed", seed, 0)):
        if value is not None and value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if k is not None and k < 1:
        raise ValueError(f"--k must be at least 1, got {k}")
    found = open_trace(file, k)
    if layers is not None:
        found = found.of_lines(tuple(dict.fromkeys(_whole_number("--layers", word) for word in layers.split(","))))
    known = found.about.get("record_bytes")
    size_of_record = record_bytes or (known if isinstance(known, int) else RECORD_BYTES)
    sweep = Sweep(_policies(policies, found), _sizes(sizes, found.k), skip, size_of_record, seed)
    return make_report(found, sweep, workers)


def _policies(text: str, found: "Trace") -> tuple[str, ...]:
    from hisparse.trace.policies import SIMULATED
    from hisparse.trace.sweep import find_policy

    if text == "all":
        has_scores = found.runners_up is not None
        return tuple(name for name, rule in SIMULATED.items() if has_scores or not rule.needs_scores)
    return tuple(dict.fromkeys(find_policy(word.strip()) for word in text.split(",")))


def _sizes(text: str, k: int) -> tuple[int, ...]:
    """'1k,2k,500': multiples of k, or slots."""
    sizes = []
    for word in (word.strip().lower() for word in text.split(",")):
        factor = k if word.endswith("k") else 1
        try:
            size = float("1" if word == "k" else word.removesuffix("k")) * factor
        except ValueError as error:
            raise ValueError(f"--sizes takes numbers and multiples of k, '1k,2k,500', got {word!r}") from error
        if not 1 <= size < 1e9:
            raise ValueError(f"--sizes takes numbers from k = {k} up, got {word!r}")
        sizes.append(round(size))
    return tuple(dict.fromkeys(sizes))


def _whole_number(option: str, word: str) -> int:
    if not word.strip().isdecimal():
        raise ValueError(f"{option} must be whole numbers, '1,4' for instance, got {word!r}")
    return int(word)


def _check_new(path: Path) -> None:
    """Raise `ValueError` for a trace that cannot be written there, before a model is loaded."""
    if path.exists():
        raise ValueError(f"--out {path} exists already: choose another name")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--out {path} is in a folder that does not exist: make it first")


def _print_report(report: dict[str, Any]) -> None:
    sizes = list(dict.fromkeys(result["size"] for result in report["results"]))
    rates = {(result["policy"], result["size"]): result["miss_rate"] for result in report["results"]}
    print(
        f"{report['trace']}: {report['steps']} steps, {report['lines']} {report['line_name']}s, k = {report['k']}; "
        f"misses in percent of k over steps {report['skip']} to {report['steps'] - 1}"
    )
    print(f"{'policy':24}" + "".join(f" {f'B = {size}':>11}" for size in sizes))
    for policy in dict.fromkeys(policy for policy, _ in rates):
        print(f"{policy:24}" + "".join(f"{100 * rates[policy, size]:12.2f}" for size in sizes))
    if report["overlap"]:
        print(f"overlap with the step before: {report['overlap']['mean']:.1%}")
    for hint in report["hints"]:
        print(
            f"hint of the recorded layer before, B = {hint['size']}: recall {hint['recall']:.1%}, precision "
            f"{hint['precision']:.1%}, traffic {hint['traffic']:.2f} times"
        )
