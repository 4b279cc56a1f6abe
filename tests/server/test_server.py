"""A real server on a real port: answers equal the engine's own, whole or streamed, and errors say what is wrong."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from hisparse.chat import encode_chat
from hisparse.checkpoint import Loaded
from hisparse.engine import Request, RequestState
from tests.server.serving import CONTEXT, MODEL, Served, SlowEngine, alone, prompt_of, wait_until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = "It was a bright cold day in April. "


def greedy(prompt: Any = TEXT, **values: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 20} | values


def chat(text: str = TEXT, **values: Any) -> dict[str, Any]:
    message = {"role": "user", "content": text}
    return {"model": MODEL, "messages": [message], "temperature": 0, "max_tokens": 20} | values


def streamed_text(events: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


def test_whole_streamed_and_alone_are_equal(served: Served, loaded: Loaded) -> None:
    expected = alone(loaded, prompt_of(loaded, TEXT), max_tokens=20)
    whole = served.post(COMPLETIONS, greedy()).json()
    events = served.stream(COMPLETIONS, greedy(stream_options={"include_usage": True}))
    assert whole["object"] == "text_completion"
    assert whole["model"] == MODEL
    assert whole["choices"] == [{"index": 0, "text": expected, "logprobs": None, "finish_reason": "length"}]
    assert streamed_text(events) == expected
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    assert all("usage" not in event for event in events[:-1])
    num_prompt = len(prompt_of(loaded, TEXT))
    usage = {"prompt_tokens": num_prompt, "completion_tokens": 20, "total_tokens": num_prompt + 20}
    assert whole["usage"] == events[-1]["usage"] == usage
    assert events[-1]["choices"] == []


def test_chat_whole_streamed_and_alone_are_equal(served: Served, loaded: Loaded) -> None:
    expected = alone(loaded, encode_chat(loaded.tokenizer, TEXT), max_tokens=20)
    whole = served.post(CHAT, chat()).json()
    events = served.stream(CHAT, chat())
    assert whole["object"] == "chat.completion"
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": expected}
    assert events[0]["object"] == "chat.completion.chunk"
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert streamed_text(events) == expected
    assert len({event["id"] for event in events}) == 1


def test_a_chat_without_a_limit_fills_the_context(served: Served) -> None:
    whole = served.post(CHAT, chat("x" * 400, max_tokens=None)).json()
    assert whole["usage"]["total_tokens"] == CONTEXT
    assert whole["choices"][0]["finish_reason"] == "length"


def test_stop_strings_end_the_text(served: Served, loaded: Loaded) -> None:
    text = alone(loaded, prompt_of(loaded, TEXT), max_tokens=20)
    stop = text[7:9]
    expected = text[: text.index(stop)]
    for stops in (stop, ["never there", stop]):
        whole = served.post(COMPLETIONS, greedy(stop=stops)).json()["choices"][0]
        events = served.stream(COMPLETIONS, greedy(stop=stops))
        assert (whole["text"], whole["finish_reason"]) == (expected, "stop")
        assert streamed_text(events) == expected
        assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_several_prompts_and_choices(served: Served, loaded: Loaded) -> None:
    prompts = ["one", "two"]
    whole = served.post(COMPLETIONS, greedy(prompts, n=2)).json()
    expected = [alone(loaded, prompt_of(loaded, prompt), max_tokens=20) for prompt in ("one", "one", "two", "two")]
    assert [choice["text"] for choice in whole["choices"]] == expected
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert whole["usage"] == {"prompt_tokens": 6, "completion_tokens": 80, "total_tokens": 86}
    events = served.stream(COMPLETIONS, greedy(prompts, n=2))
    assert [streamed_text(events, index) for index in range(4)] == expected


def test_tokens_are_prompts_too(served: Served, loaded: Loaded) -> None:
    tokens = prompt_of(loaded, TEXT)
    texts = [served.post(COMPLETIONS, greedy(prompt)).json()["choices"][0]["text"] for prompt in (tokens, [tokens])]
    assert set(texts) == {alone(loaded, tokens, max_tokens=20)}


def test_seeds_repeat_and_choices_differ(served: Served) -> None:
    body = greedy(temperature=1.0, seed=5, n=3)
    first, again = (served.post(COMPLETIONS, body).json()["choices"] for _ in range(2))
    assert first == again
    assert len({choice["text"] for choice in first}) == 3
    alone_second = served.post(COMPLETIONS, greedy(temperature=1.0, seed=6)).json()["choices"][0]["text"]
    assert first[1]["text"] == alone_second


def test_many_clients_at_once(served: Served, loaded: Loaded) -> None:
    prompts = [f"client {i} " * (1 + i % 7) for i in range(24)]

    def one(i: int) -> str:
        body = greedy(prompts[i], max_tokens=6 + i)
        if i % 2:
            return streamed_text(served.stream(COMPLETIONS, body))
        text: str = served.post(COMPLETIONS, body).json()["choices"][0]["text"]
        return text

    with ThreadPoolExecutor(len(prompts)) as threads:
        texts = list(threads.map(one, range(len(prompts))))
    assert texts == [alone(loaded, prompt_of(loaded, prompt), max_tokens=6 + i) for i, prompt in enumerate(prompts)]


def test_models_and_health(served: Served) -> None:
    [card] = served.get("/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"]) == (MODEL, CONTEXT)
    assert served.get(f"/v1/models/{MODEL}").json()["id"] == MODEL
    assert served.get("/v1/models/other").status_code == 404
    assert served.get("/health").json() == {"status": "ok"}


BAD: dict[str, tuple[str, dict[str, Any], int, str | None, str]] = {
    # what is wrong -> path, body, status, param, a word of the message
    "another model": (COMPLETIONS, greedy(model="gpt-4"), 404, "model", "gpt-4"),
    "no prompt": (COMPLETIONS, {"model": MODEL}, 400, "prompt", "required"),
    "empty prompt": (COMPLETIONS, greedy(""), 400, None, "empty"),
    "prompt past the context": (COMPLETIONS, greedy("x" * 600), 400, None, "600 tokens, this server's context is 512"),
    "prompt of the context": (COMPLETIONS, greedy("x" * 512), 400, None, "at least 1 token"),
    "unknown token": (COMPLETIONS, greedy([1, 259]), 400, "prompt", "259"),
    "negative token": (COMPLETIONS, greedy([-1]), 400, "prompt", "-1"),
    "enormous token": (COMPLETIONS, greedy([10**30]), 400, "prompt", "258"),
    "wrong type": (COMPLETIONS, greedy(temperature="hot"), 400, "temperature", "hot"),
    "text far past the context": (COMPLETIONS, greedy("x" * 100_000), 400, None, "the first 8192 of 100000 characters"),
    "too many texts": (COMPLETIONS, greedy(["a"] * 100), 400, None, "fewer"),
    "too many choices of many texts": (COMPLETIONS, greedy([[1]] * 6000, n=128), 400, None, "768000 texts"),
    "true is not one": (COMPLETIONS, greedy(best_of=True), 400, "best_of", "not supported"),
    "a token of many digits": (COMPLETIONS, greedy([10**4000]), 400, "prompt", "0000..."),
    "chat without messages": (CHAT, {"model": MODEL}, 400, "messages", "required"),
    "chat past the context": (CHAT, chat("x" * 600), 400, None, "512"),
    "chat far past the context": (CHAT, chat("x" * 100_000), 400, None, "of 100000 characters"),
    "priority": (CHAT, chat(priority="high"), 400, "priority", "high"),
    "tools": (CHAT, chat(tools=[{"type": "function"}]), 400, "tools", "not supported"),
}


@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests_are_told_what_is_wrong(served: Served, stream: bool) -> None:
    for name, (path, body, status, param, word) in BAD.items():
        response = served.post(path, body | {"stream": stream})
        error = response.json()["error"]
        assert response.status_code == status, name
        assert (error["type"], error["param"]) == ("invalid_request_error", param), name
        assert word in error["message"], (name, error["message"])


def test_extreme_numbers_that_are_valid_are_served(served: Served) -> None:
    for extreme in ({"top_k": 10**400}, {"temperature": 2, "top_p": 1e-300}, {"temperature": 5e-324}, {"seed": -1}):
        for more in ({}, {"logprobs": 3}):
            response = served.post(COMPLETIONS, {"model": MODEL, "prompt": "a", "max_tokens": 2} | extreme | more)
            assert response.status_code == 200, (extreme, response.text)


def test_what_is_no_request_is_answered_in_the_same_form(served: Served) -> None:
    malformed = httpx.post(served.url + COMPLETIONS, content=b"{'prompt'", timeout=20)
    for response, status in (
        (malformed, 400),
        (served.get("/nowhere"), 404),
        (served.get(COMPLETIONS), 405),
        (httpx.post(served.url + COMPLETIONS, content=b" " * (32 << 20), timeout=20), 413),
    ):
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert served.get(COMPLETIONS).headers["allow"] == "POST"
    assert httpx.head(f"{served.url}/health", timeout=20).status_code == 200


def test_the_queue_limit_answers_429(loaded: Loaded) -> None:
    served = Served(loaded, max_waiting=1)
    SlowEngine(served.loop.engine, seconds=0.01)
    with ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(lambda _: served.post(COMPLETIONS, greedy()), range(12)))
    assert {answer.status_code for answer in answers} == {200, 429}
    for answer in answers:
        if answer.status_code == 429:
            assert answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["code"] == "queue_full"
    served.stop()


def test_an_api_key_guards_v1(loaded: Loaded) -> None:
    served = Served(loaded, api_key="sésame")
    wrong = ("Bearer wrong", b"Bearer s\xe9same-", "sésame".encode(), "Token sésame".encode())
    for headers in ({}, *({"Authorization": one} for one in wrong)):
        refused = served.post(COMPLETIONS, greedy(), headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    key = {"Authorization": "Bearer sésame".encode()}
    assert served.post(COMPLETIONS, greedy(), headers=key).status_code == 200
    key = {"Authorization": "bearer sésame".encode()}  # schemes have no case
    assert served.post(COMPLETIONS, greedy(), headers=key).status_code == 200
    assert served.get("/v1/models").status_code == 401
    assert served.get("/health").status_code == 200
    served.stop()


def test_metrics(served: Served) -> None:
    served.post(COMPLETIONS, greedy("x" * 200, n=2))
    text = served.get("/metrics").text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(lines["hisparse_time_to_first_token_seconds_count"]) == 2
    assert float(lines["hisparse_time_per_output_token_seconds_count"]) == 2
    assert float(lines['hisparse_requests_total{reason="length"}']) == 2
    assert float(lines["hisparse_output_tokens_total"]) == 40
    for name in ("running", "waiting", "retracted", "unfinished"):
        assert float(lines[f"hisparse_{name}"]) == 0
    for layer in (0, 1):
        misses = float(lines[f'hisparse_misses_total{{layer="{layer}"}}'])
        assert misses > 0
        assert float(lines[f'hisparse_hits_total{{layer="{layer}"}}']) > 0
        assert float(lines[f'hisparse_fetched_bytes_total{{layer="{layer}"}}']) % misses == 0
    assert float(lines['hisparse_pool_used{pool="device_slots"}']) == 0
    assert float(lines['hisparse_pool_size{pool="reservations"}']) == 3
    assert all(name.startswith("hisparse_") for name in lines)


def test_metrics_while_requests_run(served: Served) -> None:
    SlowEngine(served.loop.engine, seconds=0.02)
    expected = (
        "hisparse_running 3.0",
        "hisparse_waiting 2.0",
        "hisparse_unfinished 5.0",
        'hisparse_pool_used{pool="reservations"} 3.0',
    )
    with ThreadPoolExecutor(5) as threads:
        answers = [threads.submit(served.post, COMPLETIONS, greedy(max_tokens=80)) for _ in range(5)]
        wait_until(lambda: shows(served, *expected), "three running requests, and two that wait")
        assert {answer.result().status_code for answer in answers} == {200}


def test_metrics_of_priorities(served: Served, loaded: Loaded) -> None:
    """Three that run, and one that matters more: one of them is retracted, and its text is the same."""
    SlowEngine(served.loop.engine, seconds=0.01)
    with ThreadPoolExecutor(4) as threads:
        answers = [threads.submit(served.post, COMPLETIONS, greedy(max_tokens=120, priority=5)) for _ in range(3)]
        wait_until(lambda: [request.state for request in requests_of(served)] == 3 * [RequestState.DECODING])
        urgent = threads.submit(served.post, COMPLETIONS, greedy(max_tokens=60, priority=-5))
        expected = ("hisparse_running 3.0", "hisparse_retracted 1.0", "hisparse_waiting 0.0")
        wait_until(lambda: shows(served, *expected, "hisparse_retractions_total 1.0"), "a retraction")
        texts = [answer.result().json()["choices"][0]["text"] for answer in (urgent, *answers)]
    whole = alone(loaded, prompt_of(loaded, TEXT), max_tokens=120)
    assert texts[1:] == [whole] * 3
    assert texts[0] == alone(loaded, prompt_of(loaded, TEXT), max_tokens=60)
    assert shows(served, "hisparse_retracted 0.0", "hisparse_retractions_total 1.0")


def requests_of(served: Served) -> list[Request]:
    return list(served.loop.engine._requests.values())


def shows(served: Served, *lines: str) -> bool:
    return set(lines) <= set(served.get("/metrics").text.splitlines())
