"""`hisparse generate`: text from prompts, with bounded device memory."""

import sys
from typing import Annotated

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
    PolicyOption,
    PrefetchOption,
    PromptFileOption,
    PromptOption,
    SelectorOption,
    TopKOption,
    build_config,
    print_json,
    read_prompts,
)
from hisparse.commands.session import Session, load_model, prepare, print_statistics, tokenize


def generate(
    model: ModelArgument,
    prompt: PromptOption = None,
    prompt_file: PromptFileOption = None,
    max_tokens: MaxTokensOption = 128,
    top_k: TopKOption = None,
    device_buffer_size: BufferOption = None,
    selector: SelectorOption = None,
    policy: PolicyOption = None,
    prefetch: PrefetchOption = None,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token; above 0 samples.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample among tokens that together have this probability.")] = 1.0,
    sample_top_k: Annotated[int, typer.Option(help="Sample among this many likeliest tokens; 0: all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Of the random stream; the same seed, the same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends the text. May be repeated.")] = None,
    chat: ChatOption = None,
    hisparse_config: ConfigOption = None,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "cpu",
    stats: Annotated[bool, typer.Option("--stats/--no-stats", help="Print statistics at the end.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Generate text. One prompt streams to standard output; several are printed one after the other.

    Example: hisparse generate smollm2 --prompt "Why is the sky blue?" --max-tokens 64
    """
    from hisparse.engine import SamplingParams

    config = build_config(
        hisparse_config,
        top_k=top_k,
        device_buffer_size=device_buffer_size,
        selector=selector,
        policy=policy,
        prefetch=prefetch,
    )
    params = SamplingParams(temperature, top_p, sample_top_k, seed, max_tokens, tuple(stop or ()))
    texts = read_prompts(prompt, prompt_file)
    loaded = load_model(model, dtype, device)
    session = prepare(loaded, config, tokenize(loaded, texts, chat), params)
    if as_json:
        session.run()
        print_json({"outputs": _outputs(session), **session.meter.summary()})
        return
    _run_and_print(session)
    if stats:
        print_statistics(session.meter.summary())


def _run_and_print(session: Session) -> None:
    if len(session.requests) == 1:
        _stream(session)
        return
    session.run()
    for number, request in enumerate(session.requests, start=1):
        print(f"--- prompt {number} ({request.finish_reason.value if request.finish_reason else ''})")
        print(request.text)


def _stream(session: Session) -> None:
    request, shown = session.requests[0], 0

    def show(_: object) -> None:
        nonlocal shown
        settled = request.text if request.finish_reason else request.stream.settled
        sys.stdout.write(settled[shown:])
        sys.stdout.flush()
        shown = len(settled)

    session.run(show)
    print()


def _outputs(session: Session) -> list[dict[str, object]]:
    return [
        {
            "text": request.text,
            "tokens": request.output,
            "prompt_tokens": len(request.prompt),
            "finish_reason": request.finish_reason.value if request.finish_reason else None,
        }
        for request in session.requests
    ]
