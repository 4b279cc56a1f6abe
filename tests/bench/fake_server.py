"""A server of OpenAI's API that answers as a test says, without a network."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx

DONE = "[DONE]"
Handler = Callable[[dict[str, Any]], httpx.Response]


class Body(httpx.AsyncByteStream):
    """Pieces of a body, one by one; an exception among them is raised, and None never comes."""

    def __init__(self, pieces: Sequence[bytes | Exception | None]) -> None:
        self._pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            if piece is None:
                await asyncio.Event().wait()
            elif isinstance(piece, Exception):
                raise piece
            else:
                yield piece


def text(piece: str, reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": piece, "finish_reason": reason}]}


def usage(prompt: int, output: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output}}


def lines(*events: dict[str, Any] | str | bytes) -> list[bytes]:
    written = [json.dumps(one) if isinstance(one, dict) else one for one in events]
    return [b"data: " + (one if isinstance(one, bytes) else one.encode()) + b"\n\n" for one in written]


def stream(*events: dict[str, Any] | str | bytes) -> httpx.Response:
    return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=Body(lines(*events)))


def answer(body: dict[str, Any]) -> httpx.Response:
    """A good answer, streamed or whole: as many tokens as asked for, of text."""
    prompt = body.get("prompt") or "".join(one["content"] for one in body["messages"])
    count = {"prompt_tokens": len(prompt), "completion_tokens": body["max_tokens"]}
    if not body.get("stream"):
        return httpx.Response(200, json={"choices": [], "usage": count})
    pieces = [text("x") for _ in range(body["max_tokens"])]
    return stream(*pieces, text("", "length"), usage(*count.values()), DONE)


class FakeServer:
    """Keeps what it was asked.

    Args:
        handler: answers posts.
        models: what it lists.
    """

    def __init__(self, handler: Handler = answer, models: Sequence[str] = ("fake",)) -> None:
        self.handler, self.models = handler, models
        self.bodies: list[dict[str, Any]] = []
        self.requests: list[httpx.Request] = []

    def client(self, base_url: str = "http://fake/v1", api_key: str | None = None) -> httpx.AsyncClient:
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        return httpx.AsyncClient(base_url=base_url, headers=headers, transport=httpx.MockTransport(self._respond))

    async def _respond(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": name} for name in self.models]})
        self.bodies.append(json.loads(request.content))
        return self.handler(self.bodies[-1])
