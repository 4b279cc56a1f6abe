"""The serving bench from end to end, against servers of different kinds: what it asks of them, and what it says."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from hisparse.bench import serve
from hisparse.bench.serve import Setup, bench
from hisparse.bench.serve_endpoint import EndpointError, open_client
from hisparse.bench.serve_load import Load
from hisparse.bench.serve_table import table
from tests.bench.fake_server import DONE, FakeServer, answer, stream, text, usage

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


def test_a_field_that_the_server_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    def strict(body: dict[str, Any]) -> httpx.Response:
        if "max_tokens" in body:
            return httpx.Response(400, json={"error": {"message": "max_tokens is unsupported"}})
        return answer(body | {"max_tokens": body["max_completion_tokens"]})

    server = FakeServer(strict)
    with pytest.raises(EndpointError, match=r"max_tokens is unsupported; .* leave it out with --extra"):
        run(monkeypatch, server, chat=True)
    result = run(monkeypatch, server, chat=True, extra={"max_tokens": None, "max_completion_tokens": 5})
    assert (result["completed"], result["output_tokens"]) == (10, 50)


def test_tokens_that_are_read_as_text_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeServer(lambda body: answer(body | {"prompt": str(body["prompt"])}))
    assert run(monkeypatch, server)["prompts"] == "random text"


@pytest.mark.parametrize("load", [LOAD, Load(rate=3000, requests=10)])
def test_a_server_that_counts_only_whole_answers(monkeypatch: pytest.MonkeyPatch, load: Load) -> None:
    """As llama-cpp-python does; it refuses token ids, and sends [DONE]."""

    def respond(body: dict[str, Any]) -> httpx.Response:
        if isinstance(body["prompt"], list):
            return httpx.Response(500, json={"error": {"message": "should be a valid string"}})
        if not body.get("stream"):
            return answer(body)
        return stream(*[text("x")] * body["max_tokens"], text("", "length"), DONE)

    result = run(monkeypatch, FakeServer(respond), load, input_tokens=120)
    assert (result["completed"], result["output_tokens"], result["prompt_tokens"]) == (10, 50, None)
    written = table(result)
    assert "random text, about 120 tokens;" in written
    assert "counted by chunks, in 10 of 10 answers: no usage came" in written


@pytest.mark.parametrize("load", [LOAD, Load(rate=3000, requests=10)])
def test_a_server_that_says_who_speaks_and_not_that_it_is_done(monkeypatch: pytest.MonkeyPatch, load: Load) -> None:
    """As transformers does: a first chunk of a role alone, then text, and usage beside the finish reason."""

    def delta(**fields: str) -> dict[str, Any]:
        return {"choices": [{"index": 0, "delta": fields}]}

    def respond(body: dict[str, Any]) -> httpx.Response:
        if not body.get("stream"):
            return answer(body)
        count = {"prompt_tokens": 20, "completion_tokens": 5}
        end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}], "usage": count}
        return stream(delta(role="assistant"), *[delta(content="x")] * 5, end)

    result = run(monkeypatch, FakeServer(respond), load, chat=True)
    assert (result["completed"], result["output_tokens"], result["prompt_tokens"]) == (10, 50, 200)
    assert result["output_counted_by"] == "usage"
    assert result["tpot_ms"]["mean"] > 0


def test_a_server_that_does_neither_stream_nor_heed_max_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    def respond(body: dict[str, Any]) -> httpx.Response:
        return stream(text("all of it", "stop"), usage(20, 9), DONE) if body.get("stream") else answer(body)

    result = run(monkeypatch, FakeServer(respond))
    assert (result["completed"], result["completed_long"], result["completed_in_one_piece"]) == (10, 10, 10)
    assert result["tpot_ms"]["mean"] is None
    assert "10 answers are longer than asked" in table(result)
    assert "10 answers came in one piece" in table(result)


def refuse(status: int) -> FakeServer:
    return FakeServer(lambda body: httpx.Response(status, json={"error": {"message": "so it is"}}))


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (FakeServer(models=()), "lists no model: give --model"),
        (FakeServer(models=("a", "b")), r"lists 2 models \(a, b\): choose with --model"),
        (refuse(401), "HTTP 401: so it is; give --api-key"),
        (refuse(404), "try --chat"),
        (refuse(503), "HTTP 503: so it is"),
        (refuse(400), "refuses a short prompt: HTTP 400: so it is"),
        (FakeServer(lambda body: httpx.Response(200, text="<p>hello")), "not answer in OpenAI's form: <p>hello"),
        (FakeServer(lambda body: httpx.Response(422, json={"detail": "which?"})), r"HTTP 422: which\?; if the server"),
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
