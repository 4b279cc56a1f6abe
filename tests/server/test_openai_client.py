"""OpenAI's own client, unmodified, against this server."""

from collections.abc import Iterator

import openai
import pytest

from hisparse.chat import encode_chat
from hisparse.checkpoint import Loaded
from tests.server.serving import MODEL, Served, SlowEngine, alone, assert_nothing_left, prompt_of, wait_until

TEXT = "Why is the sky blue?"


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_completion(client: openai.OpenAI, loaded: Loaded) -> None:
    done = client.completions.create(model=MODEL, prompt=TEXT, temperature=0, max_tokens=12)
    assert done.choices[0].text == alone(loaded, prompt_of(loaded, TEXT), max_tokens=12)
    assert done.choices[0].finish_reason == "length"
    assert done.usage is not None
    assert done.usage.completion_tokens == 12


def test_chat(client: openai.OpenAI, loaded: Loaded) -> None:
    done = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": TEXT}], temperature=0, max_completion_tokens=12
    )
    assert done.choices[0].message.content == alone(loaded, encode_chat(loaded.tokenizer, TEXT), max_tokens=12)
    assert done.choices[0].message.role == "assistant"


def test_streams(client: openai.OpenAI, loaded: Loaded) -> None:
    pieces = client.completions.create(model=MODEL, prompt=TEXT, temperature=0, max_tokens=12, stream=True)
    text = "".join(piece.choices[0].text for piece in pieces)
    assert text == alone(loaded, prompt_of(loaded, TEXT), max_tokens=12)
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": TEXT}],
            temperature=0,
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == alone(loaded, encode_chat(loaded.tokenizer, TEXT), max_tokens=12)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12


def test_leaving_a_stream(client: openai.OpenAI, served: Served) -> None:
    SlowEngine(served.loop.engine)
    stream = client.completions.create(model=MODEL, prompt=TEXT, max_tokens=400, stream=True)
    next(iter(stream))
    stream.close()
    wait_until(lambda: served.loop.num_unfinished == 0, "the cancellation")
    assert_nothing_left(served.loop)


def test_errors_and_models(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="context is 512") as too_long:
        client.completions.create(model=MODEL, prompt="x" * 1000)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as hot:
        client.completions.create(model=MODEL, prompt="x", temperature=9)
    assert hot.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        client.completions.create(model="gpt-4", prompt="x")
    assert [model.id for model in client.models.list()] == [MODEL]


def test_a_wrong_key(loaded: Loaded) -> None:
    served = Served(loaded, api_key="right")
    with (
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="wrong") as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="right") as client:
        assert client.models.retrieve(MODEL).id == MODEL
    served.stop()
