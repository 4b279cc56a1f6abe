"""Log-probabilities: the model's own, token by token, in step with the text, streamed or not."""

from collections.abc import Iterator
from typing import Any, cast

import openai
import pytest
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hisparse.chat import encode_chat
from hisparse.checkpoint import Loaded
from hisparse.engine import SamplingParams
from hisparse.engine.batch import Batch
from hisparse.engine.logprobs import ChosenLogprob, TokenLogprob
from hisparse.server.logprobs import LogprobWriter
from tests.server.serving import MODEL, Served, new_engine, prompt_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = "It was a bright cold day in April. "
TOKENS = 24


class Logits:
    """Observes an engine: the logits that each token was chosen from."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []

    def ran(self, batch: Batch, logits: Tensor | None) -> None:
        if logits is not None:
            self.rows += logits.double().log_softmax(dim=-1).unbind()

    def finished(self, request_id: int) -> None:
        pass


def expected(loaded: Loaded, prompt: list[int], **params: Any) -> tuple[list[int], list[Tensor]]:
    """Tokens, and the log-probabilities of every token in their place."""
    engine, logits = new_engine(loaded), Logits()
    engine.observers.append(logits)
    request = engine.submit(prompt, SamplingParams(max_tokens=TOKENS, **params))
    engine.run()
    return request.output, logits.rows


def completion(**values: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": TEXT, "temperature": 0, "max_tokens": TOKENS, "logprobs": 3} | values


def chat(**values: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": TEXT}]
    body = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": TOKENS}
    return body | {"logprobs": True, "top_logprobs": 4} | values


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.5, "top_p": 0.9, "seed": 3}])
def test_they_are_those_of_the_logits(served: Served, loaded: Loaded, sampling: dict[str, Any]) -> None:
    tokens, rows = expected(loaded, prompt_of(loaded, TEXT), **sampling)
    logprobs = served.post(COMPLETIONS, completion(**sampling)).json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == pytest.approx([float(row[t]) for row, t in zip(rows, tokens, strict=True)])
    assert len(logprobs["tokens"]) == len(logprobs["top_logprobs"]) == len(logprobs["text_offset"]) == TOKENS
    for row, token, top in zip(rows, logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        assert max(top.values()) == pytest.approx(float(row.max()))
        assert token in top
        assert len(top) <= 4


def test_a_chat_has_them_in_its_own_shape(served: Served, loaded: Loaded) -> None:
    tokens, rows = expected(loaded, encode_chat(loaded.tokenizer, TEXT))
    content = served.post(CHAT, chat()).json()["choices"][0]["logprobs"]["content"]
    assert len(content) == TOKENS
    for one, row, token in zip(content, rows, tokens, strict=True):
        assert one["logprob"] == pytest.approx(float(row[token]))
        assert [top["logprob"] for top in one["top_logprobs"]] == pytest.approx(row.topk(4).values.tolist())
        assert one["logprob"] == one["top_logprobs"][0]["logprob"]  # greedy
        assert one["token"] == loaded.tokenizer.decode([token])
        assert one["bytes"] == (None if "\ufffd" in one["token"] else list(one["token"].encode()))


def joined(events: list[dict[str, Any]], name: str) -> list[Any]:
    pieces = [choice["logprobs"] for event in events for choice in event["choices"]]
    return [one for piece in pieces if piece is not None for one in piece[name]]


@pytest.mark.parametrize("stops", [False, True])
def test_streamed_and_whole_are_equal(served: Served, stops: bool) -> None:
    text: str = served.post(COMPLETIONS, completion()).json()["choices"][0]["text"]
    stop = {"stop": [text[9:11], "never"]} if stops else {}
    whole = served.post(COMPLETIONS, completion(**stop)).json()["choices"][0]
    events = served.stream(COMPLETIONS, completion(**stop))
    for name, values in whole["logprobs"].items():
        assert joined(events, name) == values
    offsets = whole["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[0] == 0
    assert len(offsets) <= TOKENS
    assert not stops or max(offsets) < len(whole["text"])
    body = chat(**stop)
    content = served.post(CHAT, body).json()["choices"][0]["logprobs"]["content"]
    assert joined(served.stream(CHAT, body), "content") == content


def test_a_chunk_has_the_log_probabilities_of_its_text(served: Served) -> None:
    shown = 0
    for event in served.stream(COMPLETIONS, completion()):
        [choice] = event["choices"]
        shown += len(choice["text"])
        if choice["logprobs"] is not None:
            assert all(offset < shown or choice["finish_reason"] for offset in choice["logprobs"]["text_offset"])


def test_none_are_sent_where_none_are_asked_for(served: Served) -> None:
    nothing = completion(logprobs=None), chat(logprobs=False, top_logprobs=0), chat(logprobs=None, top_logprobs=None)
    for body in nothing:
        path = CHAT if "messages" in body else COMPLETIONS
        assert served.post(path, body).json()["choices"][0]["logprobs"] is None
        assert all(choice["logprobs"] is None for event in served.stream(path, body) for choice in event["choices"])


def test_the_chosen_token_alone(served: Served) -> None:
    content = served.post(CHAT, chat(top_logprobs=None)).json()["choices"][0]["logprobs"]["content"]
    assert all(one["top_logprobs"] == [] for one in content)
    logprobs = served.post(COMPLETIONS, completion(logprobs=0)).json()["choices"][0]["logprobs"]
    assert [list(top.values()) for top in logprobs["top_logprobs"]] == [[one] for one in logprobs["token_logprobs"]]


def test_several_choices_have_their_own(served: Served) -> None:
    body = completion(n=2, temperature=1, seed=1)
    choices = served.post(COMPLETIONS, body).json()["choices"]
    assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [TOKENS, TOKENS]
    assert choices[0]["logprobs"] != choices[1]["logprobs"]


def test_a_stop_token_is_no_part_of_the_answer(served: Served, loaded: Loaded) -> None:
    tokens, _ = expected(loaded, prompt_of(loaded, TEXT))
    at = next(i for i, token in enumerate(tokens) if i and token not in tokens[:i])
    served.loop.engine._stop_token_ids = frozenset({tokens[at]})
    whole = served.post(COMPLETIONS, completion()).json()
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert len(whole["choices"][0]["logprobs"]["tokens"]) == at
    assert whole["usage"]["completion_tokens"] == at + 1
    assert served.post(COMPLETIONS, completion(ignore_eos=True)).json()["usage"]["completion_tokens"] == TOKENS


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_openai_client_reads_them(client: openai.OpenAI) -> None:
    done = client.completions.create(model=MODEL, prompt=TEXT, max_tokens=4, temperature=0, logprobs=2)
    assert done.choices[0].logprobs is not None
    assert len(done.choices[0].logprobs.tokens or []) == 4
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": TEXT}], max_tokens=4, logprobs=True, top_logprobs=20
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content or []
    assert [len(one.top_logprobs) for one in content] == [20] * 4


@pytest.mark.parametrize(
    ("path", "body", "param", "word"),
    [
        (COMPLETIONS, completion(logprobs=6), "logprobs", "less than or equal to 5"),
        (COMPLETIONS, completion(logprobs=-1), "logprobs", "-1"),
        (COMPLETIONS, completion(logprobs=True), "logprobs", "True"),
        (CHAT, chat(top_logprobs=21), "top_logprobs", "21"),
        (CHAT, chat(logprobs=1), "logprobs", "1"),
        (CHAT, chat(logprobs=False), "top_logprobs", "needs logprobs to be true, got False"),
        (CHAT, chat(logprobs=None), "top_logprobs", "needs logprobs to be true, got None"),
    ],
)
def test_impossible_requests(served: Served, path: str, body: dict[str, Any], param: str, word: str) -> None:
    response = served.post(path, body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert word in response.json()["error"]["message"]


class Pieces:
    """A tokenizer of a few tokens, that decodes as SentencePiece does: a first space is lost."""

    tokens = ("\u2581the", "the", "<0xE2>", "<0xE3>", "<end>")
    texts = ("the", "the", "\ufffd", "\ufffd", "<end>")

    def decode(self, tokens: list[int]) -> str:
        return self.texts[tokens[0]]

    def convert_ids_to_tokens(self, token: int) -> str:
        return self.tokens[token]


def test_tokens_as_text() -> None:
    writer = LogprobWriter(cast(PreTrainedTokenizerBase, Pieces()))
    top = (TokenLogprob(2, -1.0), TokenLogprob(3, -2.0), TokenLogprob(1, -3.0))
    written = writer.completion([ChosenLogprob(0, -4.0, top, offset=5)])
    assert written.model_dump() == {
        "tokens": [" the"],
        "token_logprobs": [-4.0],
        "top_logprobs": [{"\ufffd": -1.0, "the": -3.0, " the": -4.0}],
        "text_offset": [5],
    }
    [one] = writer.chat([ChosenLogprob(0, -4.0, top, offset=5)]).content
    assert (one.token, one.bytes) == (" the", list(b" the"))
    assert [choice.bytes for choice in one.top_logprobs] == [None, None, list(b"the")]
