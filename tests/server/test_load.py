"""Four times the load that a server takes, with all that can go wrong at clients, and nothing is left of it.

`make test-load` does the same for ten minutes: HISPARSE_LOAD_SECONDS is how long it goes on.
"""

import asyncio
import json
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from hisparse.checkpoint import Loaded
from tests.server.load import KINDS, Clients, mixed_questions
from tests.server.serving import Served, alone, assert_nothing_left, prompt_of, wait_until

SECONDS = float(os.environ.get("HISPARSE_LOAD_SECONDS", "8"))
NUM_SILENT = 1000
MAY_GROW = 16 << 20  # bytes, from the second quarter of the time to the last: what allocators keep for later


@contextmanager
def silent_connections(served: Served) -> Iterator[None]:
    """Connections that send nothing, or not enough."""
    address = ("127.0.0.1", int(served.url.rsplit(":", 1)[1]))
    with ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(address)) for _ in range(NUM_SILENT)]
        for client in clients[:50]:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        yield


def allow_open_files(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(count, hard), hard))


def num_open_files() -> int:
    return len(os.listdir("/dev/fd"))


def test_four_times_the_capacity(loaded: Loaded) -> None:
    allow_open_files(4 * NUM_SILENT)
    questions = mixed_questions(lambda prompt, count: alone(loaded, prompt_of(loaded, prompt), max_tokens=count))
    served = Served(loaded, max_waiting=5)
    files = num_open_files()
    scheduler = served.loop.engine.scheduler
    clients = Clients(
        served.url,
        questions,
        count=4 * served.loop.max_unfinished,
        seconds=SECONDS,
        seen_all=lambda: scheduler.num_retractions > 0,
    )
    with silent_connections(served):
        asyncio.run(clients.run())
        assert served.get("/health").status_code == 200
    counts, peaks = clients.tally.counts, clients.memory.peaks(4)
    report = {"seconds": SECONDS, "requests": counts.total(), **counts, "peak_mb": [peak / 1e6 for peak in peaks]}
    print(json.dumps(report | {"retractions": scheduler.num_retractions}))

    assert clients.tally.wrong == []
    assert set(KINDS) <= set(+counts)
    assert scheduler.num_retractions > 0
    assert_nothing_left(served.loop)
    tables = served.loop.engine.runner.cache.device_pool.tables
    assert (tables.row_of_slot == -1).all()
    assert (tables.slot_of_row == -1).all()
    wait_until(lambda: num_open_files() <= files, "the end of every connection")
    assert peaks[3] - peaks[1] < MAY_GROW, peaks
    served.stop()
