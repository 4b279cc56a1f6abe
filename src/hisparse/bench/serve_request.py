"""One request of the serving bench: streamed, timed, and its outcome kept, whatever it is."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx

from hisparse.bench.serve_endpoint import describe, error_message, shorten

DONE = b"[DONE]"
HEADERS = {"Content-Type": "application/json"}
TEXT_FIELDS = ("content", "reasoning_content", "reasoning")  # of a chat's piece; servers name thoughts in two ways


class Failure(NamedTuple):
    """Why there is no whole answer."""

    kind: str  # what failures are counted by
    message: str


class StreamError(Exception):
    """A stream that is not as it should be."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.failure = Failure(kind, message)


@dataclass
class Outcome:
    """What became of a request. Times are seconds of `time.perf_counter`."""

    due_at: float  # when it was to be sent: what latencies are counted from
    asked_tokens: int
    began_at: float | None = None  # when it was sent
    text_at: list[float] = field(default_factory=list)  # when each chunk with text came
    last_at: float | None = None  # when the last text, or the finish reason, came
    over_at: float | None = None  # when nothing more could come; None: it was cut short by us
    prompt_tokens: int | None = None  # by the server's count
    usage_tokens: int | None = None  # output, by the server's count
    finish_reason: str | None = None
    failure: Failure | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the whole answer came."""
        return self.over_at is not None and self.failure is None

    @property
    def output_tokens(self) -> int:
        """As the server counted them, or else the chunks with text."""
        return len(self.text_at) if self.usage_tokens is None else self.usage_tokens

    def take(self, event: dict[str, Any], now: float) -> None:
        """Note what an event of the stream says."""
        if event.get("error") is not None or event.get("object") == "error":
            raise StreamError("error in the stream", shorten(error_message(event)))
        if usage := event.get("usage"):  # 0: the server does not count
            self.prompt_tokens = usage.get("prompt_tokens") or None
            self.usage_tokens = usage.get("completion_tokens") or None
        for choice in event.get("choices") or ():
            has_text, reason = _has_text(choice), choice.get("finish_reason")
            if has_text:
                self.text_at.append(now)
            if has_text or reason:
                self.last_at = now
            self.finish_reason = reason or self.finish_reason


async def ask(client: httpx.AsyncClient, path: str, body: bytes, outcome: Outcome, timeout_s: float) -> None:
    """Send a request and note its outcome, failures too. Cancelled, it leaves `outcome.over_at` as None."""
    outcome.began_at = time.perf_counter()
    try:
        async with asyncio.timeout(timeout_s):
            await _stream(client, path, body, outcome)
    except TimeoutError:
        outcome.failure = Failure("timeout", f"not finished {timeout_s:g} s after it was sent")
    except StreamError as error:
        outcome.failure = error.failure
    except httpx.ConnectError as error:
        outcome.failure = Failure("no connection", shorten(str(error) or type(error).__name__))
    except httpx.HTTPError as error:
        if outcome.finish_reason is None:  # or else the whole text was here already
            outcome.failure = Failure("connection lost", shorten(f"{type(error).__name__}: {error}"))
    outcome.over_at = time.perf_counter()


async def _stream(client: httpx.AsyncClient, path: str, body: bytes, outcome: Outcome) -> None:
    async with client.stream("POST", path, content=body, headers=HEADERS) as response:
        if response.status_code != httpx.codes.OK:
            await response.aread()
            raise StreamError(f"HTTP {response.status_code}", describe(response).partition(": ")[2])
        done = False
        async for data in _events(response.aiter_bytes()):
            done = done or data == DONE
            if not done:
                _take(outcome, data, time.perf_counter())
    if not done and outcome.finish_reason is None:
        kind = response.headers.get("content-type", "of no type")
        raise StreamError(
            "cut off",
            f"the answer ({kind}) ended after {len(outcome.text_at)} chunks with text, without a finish reason or "
            f"{DONE.decode()}: the server's log may say why",
        )


async def _events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each server-sent event; one line each, as all servers of this API send them."""
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
    if rest.startswith(b"data:"):
        yield rest[5:].strip()


def _take(outcome: Outcome, data: bytes, now: float) -> None:
    try:
        outcome.take(json.loads(data), now)
    except (ValueError, TypeError, AttributeError) as error:  # not JSON, or not of the form that the API has
        raise StreamError("malformed event", shorten(data.decode(errors="replace"))) from error


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(choice.get("text")) or any(delta.get(name) for name in TEXT_FIELDS)
