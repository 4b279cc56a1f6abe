"""Clients that leave, clients that say nothing, engines that fail, and servers that are told to end."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch

from hisparse.checkpoint import Loaded
from hisparse.engine.request import RequestState
from tests.server.serving import (
    PATIENCE_S,
    HeldEngine,
    Served,
    SlowEngine,
    alone,
    assert_nothing_left,
    poison,
    prompt_of,
    wait_until,
)
from tests.server.test_server import CHAT, COMPLETIONS, TEXT, chat, greedy, streamed_text


def send(served: Served, path: str, body: dict[str, Any]) -> socket.socket:
    """Send a request and do not wait for the answer."""
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    client = socket.create_connection(("127.0.0.1", int(served.url.rsplit(":", 1)[1])), timeout=PATIENCE_S)
    client.sendall(head.encode() + content)
    return client


def states(served: Served) -> list[RequestState]:
    return [request.state for request in list(served.loop.engine._requests.values())]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("state", [RequestState.WAITING, RequestState.PREFILLING, RequestState.DECODING])
def test_a_client_that_leaves_frees_everything(
    served: Served, loaded: Loaded, state: RequestState, stream: bool
) -> None:
    SlowEngine(served.loop.engine, seconds=0.01)
    body = greedy("y" * 300, max_tokens=200, stream=stream)
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(served.post, COMPLETIONS, greedy(max_tokens=60))
        clients = [send(served, COMPLETIONS, body) for _ in range(5)]
        wait_until(lambda: state in states(served) and len(states(served)) >= 5, f"a request that is {state.value}")
        for client in clients:
            client.close()
        wait_until(lambda: served.loop.num_unfinished <= 1, "the cancellation")
        text = other.result().json()["choices"][0]["text"]
    assert text == alone(loaded, prompt_of(loaded, TEXT), max_tokens=60)
    assert_nothing_left(served.loop)


def test_leaving_in_the_middle_of_a_stream(served: Served) -> None:
    SlowEngine(served.loop.engine)
    body = chat(max_tokens=400, stream=True)
    with httpx.stream("POST", served.url + CHAT, json=body, timeout=PATIENCE_S) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        assert next(line for line in lines if '"content":"' in line and '"content":""' not in line)
    wait_until(lambda: served.loop.num_unfinished == 0, "the cancellation")
    assert served.loop.engine.runner.cache.layout.max_requests == 3
    assert_nothing_left(served.loop)


def test_connections_that_send_nothing_disturb_nobody(served: Served) -> None:
    port = int(served.url.rsplit(":", 1)[1])
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
    half = [send(served, COMPLETIONS, greedy()) for _ in range(3)]
    silent[0].sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    silent[1].sendall(b"\x16\x03\x01 this is not HTTP\r\n\r\n")
    assert served.post(COMPLETIONS, greedy()).status_code == 200
    for client in (*silent, *half):
        client.close()


def test_nan_is_a_500_for_one_request(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(served.loop.engine, monkeypatch, 100)
    bad = served.post(COMPLETIONS, greedy("y" * 95))
    assert (bad.status_code, bad.json()["error"]["type"]) == (500, "server_error")
    assert "NaN" in bad.json()["error"]["message"]
    last = served.stream(COMPLETIONS, greedy("y" * 95))[-1]
    assert "NaN" in last["error"]["message"]
    assert served.post(COMPLETIONS, greedy()).status_code == 200


def test_a_failed_engine_is_a_503_for_all(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> torch.Tensor:
        raise RuntimeError("the GPU fell off the bus")

    monkeypatch.setattr(served.loop.engine.runner, "decode", broken)
    for _ in range(2):
        response = served.post(COMPLETIONS, greedy())
        assert response.status_code == 503
        assert "fell off the bus" in response.json()["error"]["message"]
    assert served.get("/health").status_code == 503


def test_shutting_down_finishes_what_runs(served: Served, loaded: Loaded) -> None:
    SlowEngine(served.loop.engine, seconds=0.01)
    body = greedy(max_tokens=60)
    with ThreadPoolExecutor(8) as threads:
        whole = [threads.submit(served.post, COMPLETIONS, body) for _ in range(4)]
        streams = [threads.submit(served.stream, COMPLETIONS, body) for _ in range(2)]
        wait_until(lambda: len(states(served)) == 6, "the requests")
        served.stop()
        texts = [answer.result().json()["choices"][0]["text"] for answer in whole]
        texts += [streamed_text(answer.result()) for answer in streams]
    assert set(texts) == {alone(loaded, prompt_of(loaded, TEXT), max_tokens=60)}
    assert_nothing_left(served.loop)
    with pytest.raises(httpx.ConnectError):
        served.post(COMPLETIONS, greedy())


def test_shutting_down_tells_what_takes_too_long(loaded: Loaded) -> None:
    served = Served(loaded, drain_s=0.3)
    SlowEngine(served.loop.engine, seconds=0.01)
    body = greedy(max_tokens=400)
    with ThreadPoolExecutor(2) as threads:
        whole = threads.submit(served.post, COMPLETIONS, body)
        stream = threads.submit(served.stream, COMPLETIONS, body)
        wait_until(lambda: states(served).count(RequestState.DECODING) == 2, "the requests")
        served.stop()
        assert whole.result().status_code == 503
        assert "shut down" in whole.result().json()["error"]["message"]
        assert "shut down" in stream.result()[-1]["error"]["message"]
    assert_nothing_left(served.loop)


def test_shutting_down_tells_clients_in_the_middle_of_a_step(loaded: Loaded) -> None:
    """The engine is in a step that does not end before everybody has left, and that is longer than the grace."""
    served = Served(loaded, drain_s=0.1)
    held = HeldEngine(served.loop.engine)
    body = greedy(max_tokens=20)
    with ThreadPoolExecutor(8) as threads:
        first = threads.submit(served.stream, COMPLETIONS, body)
        assert held.in_step.wait(PATIENCE_S)
        whole = [threads.submit(served.post, COMPLETIONS, body) for _ in range(4)]  # not even taken on
        wait_until(lambda: served.loop.num_unfinished == 5, "the requests")
        served.begin_stop()
        for answer in whole:
            assert answer.result().status_code == 503
            assert "shut down" in answer.result().json()["error"]["message"]
        assert "shut down" in first.result()[-1]["error"]["message"]
        assert served.thread.is_alive()  # it waits for the step
        held.release()
    served.stop()
    assert_nothing_left(served.loop)


def test_idle_connections_are_kept_longer_than_clients_keep_them(served: Served) -> None:
    """Else a client now and then sends into a connection that is being closed, and its request is lost."""
    kept_by_clients = httpx.Limits().keepalive_expiry
    assert kept_by_clients is not None
    assert served._server.config.timeout_keep_alive > 2 * kept_by_clients
