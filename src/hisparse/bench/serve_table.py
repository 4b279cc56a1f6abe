"""The serving bench's result as a person reads it."""

from collections.abc import Iterator, Mapping
from typing import Any

from hisparse.bench.serve_prompts import TextPrompts

LATENCIES = (
    ("time to first token", "ttft_ms"),
    ("time per output token", "tpot_ms"),
    ("inter-token (chunks)", "itl_ms"),
    ("whole request", "latency_ms"),
)
LATE_MS = 10.0  # sent later than this on average, requests were held up by the client
BUSY = 0.7  # with a larger share of a core taken by the client, its own time is in the latencies
NONE = "-"


def table(result: Mapping[str, Any]) -> str:
    """Several lines."""
    return "\n".join(_lines(result))


def _lines(result: Mapping[str, Any]) -> Iterator[str]:
    short = f", {result['completed_short']} of them shorter than asked" if result["completed_short"] else ""
    yield f"{result['model']} at {result['base_url']}, {result['api']}"
    yield f"load          {result['load']}; {_asked(result)}"
    yield f"requests      {result['sent']} sent in {result['seconds']:.1f} s: {result['completed']} completed{short}"
    yield f"              {result['failed']} failed, {result['unfinished']} unfinished{_why(result)}"
    yield (
        f"throughput    {result['requests_per_s']:.2f} requests/s, {result['output_tokens_per_s']:.1f} output "
        f"tokens/s, {_number(result['total_tokens_per_s'])} with prompts"
    )
    yield ""
    yield "milliseconds            " + "".join(name.rjust(11) for name in result["ttft_ms"])
    for title, name in LATENCIES:
        yield title.ljust(24) + "".join(_number(value).rjust(11) for value in result[name].values())
    yield from _failures(result)
    yield from _caveats(result)


def _asked(result: Mapping[str, Any]) -> str:
    given = result["input_tokens"]
    counted = result["prompt_tokens"] is not None and result["completed"]
    about = "" if counted or result["prompts"] != TextPrompts.kind else "about "  # nobody counted
    prompts = f"prompts: {result['prompts']}" + ("" if given is None else f", {about}{given} tokens")
    if given is not None and counted:
        prompts += f" ({result['prompt_tokens'] / result['completed']:.0f} by the server's count)"
    return f"{prompts}; {result['asked_output_tokens']} tokens out"


def _why(result: Mapping[str, Any]) -> str:
    return " (interrupted)" if result["interrupted"] else ""


def _failures(result: Mapping[str, Any]) -> Iterator[str]:
    if result["failures"]:
        yield ""
        yield "failures"
    for kind, count in result["failures"].items():
        yield f"  {count:>6}  {kind}: {result['failure_examples'][kind]}"


def _caveats(result: Mapping[str, Any]) -> Iterator[str]:
    late = result["sent_late_ms"]["mean"]
    notes = []
    if result["output_counted_by"] != "usage":
        notes.append(f"output tokens are counted by {result['output_counted_by']}: no usage came")
    if result["completed_long"]:
        notes.append(f"{result['completed_long']} answers are longer than asked: the server does not heed max_tokens")
    if result["completed_in_one_piece"]:
        notes.append(
            f"{result['completed_in_one_piece']} answers came in one piece: their time to first token is that of the "
            f"whole, and they have no time per output token"
        )
    if result["output_tokens_of_others"]:
        notes.append(
            f"{result['output_tokens_of_others']} output tokens of requests that did not complete, not counted"
        )
    if late is not None and late > LATE_MS:
        notes.append(f"requests were sent {late:.0f} ms late on average: this client is too slow for the load")
    if result["client_busy"] > BUSY:
        notes.append(f"this client was busy {result['client_busy']:.0%} of the time: latencies have its share in them")
    if notes:
        yield ""
    yield from notes


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:.1f}"
