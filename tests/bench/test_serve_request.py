"""One request of the serving bench, against servers that answer well, differently, badly or not at all."""

import asyncio
from typing import Any

import httpx
import pytest

from hisparse.bench.serve_request import Outcome, ask
from tests.bench.fake_server import DONE, Body, FakeServer, lines, stream, text, usage


def outcome_of(response: httpx.Response | Exception, *, chat: bool = False, timeout_s: float = 60) -> Outcome:
    def respond(body: dict[str, Any]) -> httpx.Response:
        if isinstance(response, Exception):
            raise response
        return response

    async def run() -> Outcome:
        outcome = Outcome(due_at=0.0, asked_tokens=3)
        async with FakeServer(respond).client() as client:
            await ask(client, "chat/completions" if chat else "completions", b"{}", outcome, timeout_s)
        return outcome

    return asyncio.run(run())


def test_a_whole_answer_with_usage() -> None:
    outcome = outcome_of(stream(text("a"), text(""), text("bc"), text("", "length"), usage(5, 3), DONE))
    assert outcome.is_complete
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.finish_reason) == (5, 3, "length")
    assert len(outcome.text_at) == 2
    assert outcome.began_at is not None
    assert outcome.last_at is not None
    assert outcome.over_at is not None
    assert outcome.began_at <= outcome.text_at[0] <= outcome.text_at[1] <= outcome.last_at <= outcome.over_at


def test_a_server_without_usage_has_its_chunks_counted() -> None:
    outcome = outcome_of(stream(text("a"), text("b", "stop") | {"usage": None}, DONE))
    assert outcome.is_complete
    assert (outcome.prompt_tokens, outcome.usage_tokens, outcome.output_tokens) == (None, None, 2)


def test_a_server_that_sends_usage_and_does_not_count_has_its_chunks_counted() -> None:
    outcome = outcome_of(stream(text("a"), text("b", "stop"), usage(0, 0), DONE))
    assert (outcome.prompt_tokens, outcome.output_tokens) == (None, 2)


def test_a_connection_that_is_lost_after_the_last_text() -> None:
    pieces: list[bytes | Exception | None] = [*lines(text("a"), text("b", "stop"), usage(5, 2), DONE)]
    outcome = outcome_of(httpx.Response(200, stream=Body([*pieces, httpx.RemoteProtocolError("gone")])))
    assert outcome.is_complete
    assert outcome.output_tokens == 2


@pytest.mark.parametrize("field", ["content", "reasoning_content", "reasoning"])
def test_a_chat_and_its_thoughts(field: str) -> None:
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}, {field: "a"}, {"content": "b"}, {}]
    events = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    outcome = outcome_of(stream(*events, DONE), chat=True)
    assert outcome.is_complete
    assert len(outcome.text_at) == 2


def test_events_may_come_in_any_pieces() -> None:
    whole = b": comment\r\n\r\nevent: x\r\n" + b"".join(lines(text("\u2028\x85é"), usage(1, 1), DONE)).replace(
        b"\n", b"\r\n"
    ).removesuffix(b"\r\n\r\n")
    pieces = [whole[i : i + 1] for i in range(len(whole))]
    outcome = outcome_of(httpx.Response(200, stream=Body(pieces)))
    assert outcome.is_complete
    assert (len(outcome.text_at), outcome.usage_tokens) == (1, 1)


FAILURES: dict[str, tuple[httpx.Response | Exception, str, str]] = {
    "refused": (httpx.Response(429, json={"error": {"message": "queue is full"}}), "HTTP 429", "queue is full"),
    "refused in another form": (httpx.Response(400, json={"object": "error", "message": "no"}), "HTTP 400", "no"),
    "refused by a proxy": (httpx.Response(502, text="<html>\nBad gateway"), "HTTP 502", "<html> Bad gateway"),
    "no server": (httpx.ConnectError("refused"), "no connection", "refused"),
    "gone at once": (httpx.RemoteProtocolError("gone"), "connection lost", "RemoteProtocolError: gone"),
    "gone in between": (
        httpx.Response(200, stream=Body([*lines(text("a")), httpx.ReadError("reset")])),
        "connection lost",
        "ReadError: reset",
    ),
    "an error in the stream": (
        stream(text("a"), {"error": {"message": "stopping"}}),
        "error in the stream",
        "stopping",
    ),
    "an error of the older form": (
        stream({"object": "error", "message": "out of memory"}, DONE),
        "error in the stream",
        "out of memory",
    ),
    "an error that is a text": (stream({"error": "no memory", "error_type": "x"}), "error in the stream", "no memory"),
    "refused by a framework": (httpx.Response(422, json={"detail": "no such field"}), "HTTP 422", "no such field"),
    "interrupted for another": (
        httpx.Response(200, stream=Body([*lines(text("a"), DONE), httpx.RemoteProtocolError("gone")])),
        "connection lost",
        "gone",
    ),
    "nothing at all": (stream(), "cut off", "after 0 chunks with text"),
    "cut off": (stream(text("a"), text("b")), "cut off", "text/event-stream"),
    "not a stream": (httpx.Response(200, json={"choices": []}), "cut off", "application/json"),
    "not JSON": (stream(text("a"), b"{oops"), "malformed event", "{oops"),
    "not an object": (stream(text("a"), b"[1]"), "malformed event", "[1]"),
    "not of the API": (stream({"choices": ["a"]}), "malformed event", "choices"),
    "not text": (stream(b"\xff\xfe"), "malformed event", ""),
}


@pytest.mark.parametrize("name", FAILURES)
def test_failures_are_told_apart(name: str) -> None:
    response, kind, message = FAILURES[name]
    outcome = outcome_of(response)
    assert not outcome.is_complete
    assert outcome.failure is not None
    assert outcome.failure.kind == kind
    assert message in outcome.failure.message
    assert outcome.over_at is not None


def test_a_timeout_is_a_failure() -> None:
    outcome = outcome_of(httpx.Response(200, stream=Body([*lines(text("a")), None])), timeout_s=0.05)
    assert outcome.failure is not None
    assert outcome.failure.kind == "timeout"
    assert outcome.output_tokens == 1
