"""`hisparse bench serve`: load on any server of OpenAI's API."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from hisparse.commands.options import print_json
from hisparse.commands.progress import bars, say

CONCURRENCY, REQUESTS, INPUT_TOKENS = 8, 100, 512  # where nothing is said
INTERRUPTED = 130


def serve(
    base_url: Annotated[str, typer.Option(help="The server's address, with or without /v1.")] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option(help="The model's name there.", show_default="the one that the server lists")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="The server's key.")] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(help="Closed loop: so many requests at once.", show_default=f"{CONCURRENCY}"),
    ] = None,
    request_rate: Annotated[
        float | None, typer.Option(help="Poisson: so many requests a second on average, however many are unfinished.")
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(help="The most requests.", show_default=f"{REQUESTS}; with --duration, no limit"),
    ] = None,
    duration: Annotated[float | None, typer.Option(help="Send nothing new after so many seconds.")] = None,
    input_tokens: Annotated[
        int | None, typer.Option(help="Length of random prompts.", show_default=f"{INPUT_TOKENS}")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="A file of prompts: one a line, or .jsonl with strings, lists of tokens, or objects with "
            "'prompt' or 'messages' and perhaps 'max_tokens'."
        ),
    ] = None,
    output_tokens: Annotated[int, typer.Option(help="The most tokens of an answer.")] = 128,
    chat: Annotated[bool, typer.Option("--chat", help="Ask for chat completions.")] = False,
    extra: Annotated[
        str | None,
        typer.Option(
            help="""Fields of every request, as JSON: '{"ignore_eos": true}' for answers of full length. """
            """One that is null is left out: '{"max_tokens": null, "max_completion_tokens": 99}'."""
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides random prompts and arrivals.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds after which a request has failed.")] = 600.0,
    warm_up: Annotated[int, typer.Option(help="Requests before the load, not measured.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line, for machines.")] = False,
) -> None:
    """Load on any server of OpenAI's API: throughput, latencies, failures. Ctrl-C gives what was measured so far.

    Rates and latencies are those of whole answers; what failed, was refused or did not finish is counted beside
    them, never averaged in. Latencies count from the moment a request was due.

    Example: hisparse bench serve --concurrency 32 --requests 500 --input-tokens 1000 --output-tokens 200
    """
    if find_spec("httpx") is None:
        raise ValueError("the serving bench needs httpx: pip install 'hisparse[bench]'")
    from hisparse.bench.serve import Setup, bench
    from hisparse.bench.serve_load import Load
    from hisparse.bench.serve_table import table

    if concurrency is not None and request_rate is not None:
        raise ValueError("--concurrency (closed loop) and --request-rate (Poisson) are different loads: give one")
    if concurrency is None and request_rate is None:
        concurrency = CONCURRENCY
    if requests is None and duration is None:
        requests = REQUESTS
    setup = Setup(
        base_url,
        Load(concurrency, request_rate, requests, duration, seed),
        model=model,
        api_key=api_key,
        chat=chat,
        input_tokens=INPUT_TOKENS if input_tokens is None and prompts is None else input_tokens,
        prompts_file=prompts,
        output_tokens=output_tokens,
        seed=seed,
        timeout_s=timeout,
        extra=_fields(extra),
        warm_up=warm_up,
    )
    say(f"{setup.load}: Ctrl-C ends it with what was measured so far")
    with bars() as group:
        bar = group.bar("requests", requests) if requests is not None else None
        result = bench(setup, on_end=lambda: bar.advance(1) if bar is not None else None)
    if as_json:
        print_json(result)
    else:
        print(table(result))
    _leave(result)


OWN_FIELDS = {
    "stream": "every answer is timed as it streams",
    "n": "a request is one answer",
    "prompt": "see --prompts",
    "messages": "see --prompts",
}


def _fields(extra: str | None) -> dict[str, Any]:
    try:
        fields = json.loads(extra or "{}")
    except ValueError as error:
        raise ValueError(f"--extra is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"--extra must be a JSON object, got {extra}")
    for name, reason in OWN_FIELDS.items():
        if name in fields:
            raise ValueError(f"--extra cannot set {name!r}: {reason}")
    return fields


def _leave(result: dict[str, Any]) -> None:
    if result["interrupted"]:
        raise typer.Exit(INTERRUPTED)
    if not result["completed"]:
        raise ValueError(f"none of {result['sent']} requests completed: {result['failure_examples']}")
