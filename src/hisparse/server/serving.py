"""The process around an application: uvicorn, the engine loop's start and end, and signals.

At SIGTERM or Ctrl-C no new request is taken, running ones finish within the drain time, and what is left then is
told so; a second Ctrl-C ends at once.
"""

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from hisparse.server.engine_loop import EngineLoop

GRACE_S = 5.0  # for answers to be written after their requests were ended
KEEP_ALIVE_S = 60  # idle connections: longer than clients keep theirs (httpx 5 s), or they would send into a closed one
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def bind(host: str, port: int) -> socket.socket:
    """A socket at this address (port 0: a free one) that does not listen yet. Raises `OSError`."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def url_of(listener: socket.socket) -> str:
    """Where clients find it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """Serves an application, and drains its engine loop before it ends.

    Args:
        app: over the loop.
        loop: started here, and stopped.
        listener: bound to where clients come (see `bind`).
        drain_s: how long running requests may go on after the signal to end.
        log_level: uvicorn's.
    """

    def __init__(
        self, app: FastAPI, loop: EngineLoop, listener: socket.socket, *, drain_s: float, log_level: str = "warning"
    ) -> None:
        grace = round(drain_s + GRACE_S)
        super().__init__(
            uvicorn.Config(app, log_level=log_level, timeout_graceful_shutdown=grace, timeout_keep_alive=KEEP_ALIVE_S)
        )
        self.on_started: Callable[[], None] = lambda: None  # called once clients are heard
        self._listener = listener
        self._engine_loop = loop
        self._drain_s = drain_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the engine with the server."""
        self._engine_loop.start()
        await super().startup(sockets)
        if self.started:
            self.on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let running requests finish while no new ones come."""
        self._engine_loop.begin_stop(self._drain_s)
        await super().shutdown(sockets)
        await self._engine_loop.stop(timeout_s=0)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Drain at a signal and then end normally, where uvicorn would raise the signal again."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def run_until_signal(self) -> None:
        """Serve until a signal comes."""
        asyncio.run(self.serve(sockets=[self._listener]))
