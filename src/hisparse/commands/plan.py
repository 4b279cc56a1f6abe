"""`hisparse plan`: what fits on a machine, what it costs on the link, and the configuration to serve it with."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hisparse.commands.options import (
    BufferOption,
    ConfigOption,
    JsonOption,
    PolicyOption,
    SelectorOption,
    TopKOption,
    build_config,
    print_json,
)
from hisparse.errors import NeverFitsError

if TYPE_CHECKING:
    from hisparse.plan.plan import Plan


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A checkpoint folder (config.json is enough), a GGUF file, or one of glm-5.1, glm-5.2, deepseek-v3.2.",
            show_default=False,
        ),
    ],
    device_memory: Annotated[str, typer.Option(help="Of one GPU, such as 141GB.", show_default=False)],
    host_memory: Annotated[
        str, typer.Option(help="What all host pools together may take, such as 2TB.", show_default=False)
    ],
    context: Annotated[
        str | None,
        typer.Option(help="Tokens of a request with its answer, such as 128K (131,072).", show_default="the model's"),
    ] = None,
    gpus: Annotated[int, typer.Option(help="How many GPUs.")] = 1,
    attention: Annotated[
        str,
        typer.Option(
            help="Over several GPUs: 'dp', each attends for its own requests; 'tp', all for all; 'auto': dp for latent "
            "attention, tp where KV heads can be divided."
        ),
    ] = "auto",
    link: Annotated[float, typer.Option(help="GB/s from host memory to each GPU; PCIe 5 x16 measured 53.")] = 53.0,
    step_budget: Annotated[float, typer.Option(help="Milliseconds that fetches may take the link a step.")] = 30.0,
    memory_fraction: Annotated[
        float, typer.Option(help="Share of a GPU's memory for weights and cache; the rest: activations, graphs.")
    ] = 0.95,
    weight_memory: Annotated[
        str | None,
        typer.Option(help="Bytes of all weights, such as 400GB.", show_default="as the configuration says"),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Take expected misses from this selection trace.", show_default="the paper's figures"),
    ] = None,
    top_k: TopKOption = None,
    device_buffer_size: BufferOption = None,
    selector: SelectorOption = None,
    policy: PolicyOption = None,
    hisparse_config: ConfigOption = None,
    dtype: Annotated[str, typer.Option("--dtype", help="float32, bfloat16 or float16, of records.")] = "bfloat16",
    as_json: JsonOption = False,
) -> None:
    """Say what fits: bytes a token, requests at once with everything on the device and hierarchically, link time.

    Reads a configuration, no weights. Leaves with 2, after the figures, if nothing fits.

    Example: hisparse plan glm-5.1 --device-memory 141GB --host-memory 2TB --context 128K --gpus 8
    """
    from hisparse.plan.plan import make_plan
    from hisparse.plan.question import ask

    config = build_config(
        hisparse_config, top_k=top_k, device_buffer_size=device_buffer_size, selector=selector, policy=policy
    )
    question = ask(
        model,
        config,
        device_memory=device_memory,
        host_memory=host_memory,
        context=context,
        gpus=gpus,
        attention=attention,
        link=link,
        step_budget=step_budget,
        memory_fraction=memory_fraction,
        weight_memory=weight_memory,
        dtype=dtype,
        trace=trace,
    )
    _answer(make_plan(question), as_json)


def _answer(answer: "Plan", as_json: bool) -> None:
    """Print the figures, and refuse what cannot be served."""
    from hisparse.plan import report, ways_out
    from hisparse.plan.plan_table import print_plan

    recommended = answer.recommended  # raises for keys that do not go together, before anything is printed
    if as_json:
        print_json(report.as_json(answer))
    else:
        print_plan(answer)
    if not any(option.capacity.requests for option in answer.options):
        raise NeverFitsError(ways_out.why_nothing_fits(answer.question))
    if recommended is None:
        raise NeverFitsError(ways_out.why_over_budget(answer))
