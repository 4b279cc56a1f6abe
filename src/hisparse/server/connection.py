"""The client's end of the line: bodies of a sane size, streams of events, and noticing when nobody is there."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from hisparse.server.errors import ApiError

MAX_BODY_BYTES = 64 << 20  # whatever the context is: ten million tokens of text
DONE = "[DONE]"

Result = TypeVar("Result")


async def read_body(request: Request, most_bytes: int) -> bytes:
    """A request's body. Raises `ApiError` if it is longer than anything that could be answered."""
    most_bytes = min(most_bytes, MAX_BODY_BYTES)
    body, num_bytes = bytearray(), 0
    async for part in request.stream():  # to its end, if that is near: many clients read no answer before
        num_bytes += len(part)
        if num_bytes <= most_bytes:
            body += part
        elif num_bytes > MAX_BODY_BYTES:
            break
    if num_bytes > most_bytes:
        raise ApiError(f"the body is longer than {most_bytes} bytes: shorten the prompt", status=413)
    return bytes(body)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The work's result. If the client leaves first, the work is cancelled and `ClientDisconnect` raised."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, one for each text of a generator.

    Args:
        events: the data of each event.
        on_end: called once nobody listens any more, for whatever reason.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None], on_end: Callable[[], None]) -> None:
        self._events, self._on_end = events, on_end
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self.raw_headers = [header for header in self.raw_headers if header[0] != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events while the client is there."""
        try:
            await while_connected(receive, self._send_all(send))
        except ClientDisconnect:
            pass
        finally:
            self._on_end()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events) as events:
            async for event in events:
                await _send_body(send, f"data: {event}\n\n", more=True)
        await _send_body(send, f"data: {DONE}\n\n", more=False)


async def _send_body(send: Send, text: str, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": more})
