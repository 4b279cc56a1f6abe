"""Bodies as clients send them: what is taken, and what each mistake is told."""

import json
from typing import Any

import pytest

from hisparse.server.errors import ApiError
from hisparse.server.protocol import ChatRequest, CompletionRequest, parse

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def completion(**values: Any) -> CompletionRequest:
    return parse(CompletionRequest, json.dumps({"prompt": "a"} | values).encode())


def chat(**values: Any) -> ChatRequest:
    return parse(ChatRequest, json.dumps(CHAT | values).encode())


def test_prompts_of_every_kind() -> None:
    assert completion(prompt="a").prompt == ["a"]
    assert completion(prompt=["a", "b"]).prompt == ["a", "b"]
    assert completion(prompt=[1, 2]).prompt == [[1, 2]]
    assert completion(prompt=[[1, 2], [3]]).prompt == [[1, 2], [3]]


def test_unknown_fields_and_nulls_are_ignored() -> None:
    asked = chat(user="me", metadata={"a": 1}, temperature=None, stop=None, n=None, tools=None, logit_bias={})
    assert asked.sampling(0, room=7).max_tokens == 7


def test_openai_defaults() -> None:
    params = completion().sampling(0, room=100)
    assert (params.temperature, params.top_p, params.top_k, params.seed, params.max_tokens) == (1, 1, 0, None, 16)
    assert chat(max_tokens=3, max_completion_tokens=4).sampling(0, room=100).max_tokens == 4


def test_priorities() -> None:
    assert completion().priority is None
    assert completion(priority=-3).priority == -3
    assert chat(priority=7).priority == 7


def test_each_choice_has_a_seed_of_its_own() -> None:
    seeds = [completion(seed=2**63 - 1, n=3).sampling(choice, room=1).seed for choice in range(3)]
    assert seeds == [2**63 - 1, 0, 1]
    assert completion(stop="x").sampling(0, room=1).stop == ("x",)
    assert completion(stop=["x", "yy"]).sampling(0, room=1).stop == ("x", "yy")


def test_content_may_come_in_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0].content == "ab"


BAD: dict[str, tuple[dict[str, Any], str]] = {  # name -> (fields, the param that is blamed)
    "temperature of the wrong type": ({"temperature": "warm"}, "temperature"),
    "temperature as text": ({"temperature": "1.0"}, "temperature"),
    "temperature too high": ({"temperature": 2.5}, "temperature"),
    "negative temperature": ({"temperature": -0.1}, "temperature"),
    "top_p of 0": ({"top_p": 0}, "top_p"),
    "no tokens": ({"max_tokens": 0}, "max_tokens"),
    "half a token": ({"max_tokens": 1.5}, "max_tokens"),
    "true tokens": ({"max_tokens": True}, "max_tokens"),
    "a seed beyond 64 bits": ({"seed": 2**63}, "seed"),
    "empty stop string": ({"stop": [""]}, "stop.0"),
    "stop of the wrong type": ({"stop": 5}, "stop"),
    "too many stop strings": ({"stop": ["x"] * 17}, "stop"),
    "priority of the wrong type": ({"priority": "high"}, "priority"),
    "enormous priority": ({"priority": 2**31}, "priority"),
    "no choices": ({"n": 0}, "n"),
    "a million choices": ({"n": 1_000_000}, "n"),
    "stream of the wrong type": ({"stream": "yes"}, "stream"),
    "stream_options of the wrong type": ({"stream_options": []}, "stream_options"),
    "logprobs of the wrong type": ({"logprobs": True}, "logprobs"),
    "too many logprobs": ({"logprobs": 6}, "logprobs"),
    "echo": ({"echo": True}, "echo"),
    "penalty": ({"presence_penalty": 0.5}, "presence_penalty"),
    "no prompt": ({"prompt": None}, "prompt"),
    "no prompts": ({"prompt": []}, "prompt"),
    "mixed prompts": ({"prompt": ["a", 1]}, "prompt"),
    "prompt of an object": ({"prompt": {}}, "prompt"),
    "model of the wrong type": ({"model": 3}, "model"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_named(name: str) -> None:
    fields, param = BAD[name]
    with pytest.raises(ApiError) as refused:
        completion(**fields)
    assert refused.value.status == 400
    assert refused.value.param == param
    assert param.split(".")[0] in str(refused.value)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"content": "a"}], "messages.0.role"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages.0.content"),
        ([{"role": "user", "content": 1}], "messages.0.content"),
    ],
)
def test_what_is_wrong_with_messages_is_named(messages: Any, param: str) -> None:
    with pytest.raises(ApiError) as refused:
        chat(messages=messages)
    assert refused.value.param == param


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
    ],
)
def test_malformed_bodies(body: bytes) -> None:
    with pytest.raises(ApiError, match="JSON") as refused:
        parse(CompletionRequest, body)
    assert refused.value.status == 400
    assert len(str(refused.value)) < 300
