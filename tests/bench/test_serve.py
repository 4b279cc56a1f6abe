"""The serving bench from end to end, against servers of different kinds: what it asks of them, and what it says."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from hisparse.bench import serve
from hisparse.bench.serve import Setup, bench
from hisparse.bench.serve_endpoint import EndpointError, open_client
from hisparse.bench.serve_load import Load
from tests.bench.fake_server import FakeServer, answer

LOAD = Load(concurrency=3, requests=10)


def run(monkeypatch: pytest.MonkeyPatch, server: FakeServer, load: Load = LOAD, **values: Any) -> dict[str, Any]:
    monkeypatch.setattr(serve, "open_client", server.client)
    if "prompts_file" not in values:
        values = {"input_tokens": 20} | values
    return bench(Setup("http://fake/v1", load, output_tokens=5, **values))


def measured(server: FakeServer, count: int) -> list[dict[str, Any]]:
    return server.bodies[-count:]


@pytest.mark.parametrize("load", [LOAD, Load(rate=3000, requests=10)])
def test_token_ids_where_they_are_taken(monkeypatch: pytest.MonkeyPatch, load: Load) -> None:
    server = FakeServer()
    result = run(monkeypatch, server, load)
    assert (result["model"], result["prompts"], result["api"]) == ("fake", "random token ids", "completions")
    assert (result["sent"], result["completed"], result["failed"]) == (10, 10, 0)
    assert (result["prompt_tokens"], result["output_tokens"]) == (200, 50)
    assert result["client_busy"] > 0
    assert len({str(body["prompt"]) for body in server.bodies}) == 12  # a probe, the warm-up, and the load
    for body in measured(server, 10):
        assert len(body["prompt"]) == 20
        assert set(body) == {"model", "prompt", "max_tokens", "temperature", "stream", "stream_options"}
        assert body["max_tokens"] == 5


def test_a_small_vocabulary_gets_small_token_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    def small(body: dict[str, Any]) -> httpx.Response:
        return httpx.Response(400) if max(body["prompt"]) > 258 else answer(body)

    server = FakeServer(small)
    assert run(monkeypatch, server)["prompts"] == "random token ids"
    assert all(max(body["prompt"]) <= 250 for body in measured(server, 10))


@pytest.mark.parametrize("chat", [False, True])
def test_text_where_token_ids_are_not_taken(monkeypatch: pytest.MonkeyPatch, chat: bool) -> None:
    def text_only(body: dict[str, Any]) -> httpx.Response:
        return httpx.Response(422) if isinstance(body.get("prompt"), list) else answer(body)

    server = FakeServer(text_only)
    result = run(monkeypatch, server, chat=chat, input_tokens=120)
    assert result["prompts"] == "random text"
    assert result["completed"] == 10
    mean = result["prompt_tokens"] / 10  # this server's tokens are characters
    assert mean == pytest.approx(120, rel=0.25)
    if chat:
        assert all(body["messages"][0]["role"] == "user" for body in server.bodies)


def test_a_file_of_prompts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('"one"\n{"prompt": [7, 8], "max_tokens": 2}\n')
    server = FakeServer()
    result = run(monkeypatch, server, Load(concurrency=1, requests=4), prompts_file=file)
    asked = [(body["prompt"], body["max_tokens"]) for body in measured(server, 4)]
    assert asked == [("one", 5), ([7, 8], 2)] * 2
    assert result["completed_short"] == 0
    (tmp_path / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "c"}]}')
    with pytest.raises(ValueError, match="add --chat"):
        run(monkeypatch, server, prompts_file=tmp_path / "chat.jsonl")
    run(monkeypatch, server, prompts_file=tmp_path / "chat.jsonl", chat=True)
    assert server.bodies[-1]["messages"] == [{"role": "user", "content": "c"}]


def test_refusals_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(body: dict[str, Any]) -> httpx.Response:
        if body.get("stream") and len(server.bodies) % 2:
            return httpx.Response(429, json={"error": {"message": "full"}})
        return answer(body)

    server = FakeServer(busy)
    result = run(monkeypatch, server)
    assert (result["completed"], result["failures"]) == (5, {"HTTP 429": 5})
    assert result["output_tokens"] == 25


def test_fields_of_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeServer(models=())
    run(monkeypatch, server, model="named", api_key="key", extra={"ignore_eos": True, "temperature": 1})
    assert all((body["ignore_eos"], body["temperature"], body["model"]) == (True, 1, "named") for body in server.bodies)


def refuse(status: int) -> FakeServer:
    return FakeServer(lambda body: httpx.Response(status, json={"error": {"message": "so it is"}}))


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (FakeServer(models=()), "lists 0 models"),
        (FakeServer(models=("a", "b")), r"lists 2 models \(a, b\): choose with --model"),
        (refuse(401), "HTTP 401: so it is; give --api-key"),
        (refuse(404), "try --chat"),
        (refuse(503), "HTTP 503: so it is"),
        (refuse(400), "refuses a short prompt: HTTP 400: so it is"),
    ],
)
def test_a_server_that_cannot_be_measured(monkeypatch: pytest.MonkeyPatch, server: FakeServer, message: str) -> None:
    with pytest.raises(EndpointError, match=message):
        run(monkeypatch, server)


def test_a_load_that_would_fail_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_long(body: dict[str, Any]) -> httpx.Response:
        return httpx.Response(400, json={"error": {"message": "too long"}}) if body.get("stream") else answer(body)

    server = FakeServer(too_long)
    with pytest.raises(EndpointError, match="failed already: HTTP 400: too long"):
        run(monkeypatch, server)
    assert run(monkeypatch, server, warm_up=0)["failures"] == {"HTTP 400": 10}


def test_addresses() -> None:
    for given, used in (
        ("http://host:1", "http://host:1/v1/"),
        ("http://host:1/", "http://host:1/v1/"),
        ("https://host/api/v1/", "https://host/api/v1/"),
    ):
        assert str(open_client(given, None).base_url) == used
    for bad in ("host:8000", "127.0.0.1:8000", "ftp://host", "http://", "http://host:port"):
        with pytest.raises(ValueError, match="--base-url"):
            open_client(bad, None)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"input_tokens": None}, "give one of them"),
        ({"input_tokens": 0}, "--input-tokens must be at least 1"),
        ({"output_tokens": 0}, "--output-tokens must be at least 1"),
        ({"timeout_s": 0}, "--timeout must be above 0"),
        ({"warm_up": -1}, "--warm-up must be 0 or more"),
    ],
)
def test_impossible_setups(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Setup("http://fake", LOAD, **({"input_tokens": 1} | values))
