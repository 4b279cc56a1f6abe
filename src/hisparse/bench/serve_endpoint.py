"""The server under load, known only by OpenAI's API: where it is, what it serves, what a request to it looks like.

Nothing here is particular to this package's own server.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from hisparse.bench.serve_prompts import Prompt, Prompts, TextPrompts, TokenPrompts
from hisparse.errors import HiSparseError

CONNECT_S = 30.0
IDLE_S = 2.0  # an idle connection is not used again after this: servers close theirs after 5 s or more
PROBE_S = 300.0  # for requests that are not measured
PROBE_TOKENS = 16
# Every tokenizer of a real model has the first range, and no special token in it; tiny ones of bytes have the second.
TOKEN_RANGES = ((100, 29_999), (3, 250))
REFUSES_INPUT = (400, 422, 500, 501)  # how servers answer to a kind of prompt that they do not know
MARKS = 4  # the most special tokens that a server puts around the tokens of a prompt
LEAVE_OUT = """if the server does not know a field, leave it out with --extra '{"NAME": null}'"""


class EndpointError(HiSparseError):
    """The server cannot be measured: it does not answer, or refuses what it is asked before the load begins."""


@dataclass(frozen=True)
class Endpoint:
    """Where requests go.

    Args:
        model: its name.
        chat: ask /chat/completions, not /completions.
        extra: fields that every request has besides the standard ones, and instead of them; None leaves one out.
    """

    model: str
    chat: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """Where requests are posted, after the base address."""
        return "chat/completions" if self.chat else "completions"

    def body(self, prompt: Prompt, max_tokens: int, *, stream: bool = True) -> dict[str, Any]:
        """A request for at most so many tokens."""
        streaming = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        content: dict[str, Any] = {"prompt": prompt.content}
        if self.chat:
            messages = prompt.content if prompt.is_messages else [{"role": "user", "content": prompt.content}]
            content = {"messages": messages}
        asked = {"model": self.model, "max_tokens": max_tokens, "temperature": 0}
        fields = {**content, **asked, **streaming, **self.extra}
        return {name: value for name, value in fields.items() if value is not None}


def open_client(base_url: str, api_key: str | None) -> httpx.AsyncClient:
    """A client without limits of its own. `base_url`: with or without the /v1 at its end. Raises `ValueError`."""
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL as error:
        raise ValueError(f"--base-url {base_url!r} is no address: {error}") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"--base-url must be like http://127.0.0.1:8000, got {base_url!r}")
    if not url.path.strip("/"):
        url = url.copy_with(path="/v1")
    return httpx.AsyncClient(
        base_url=url,
        headers=[] if api_key is None else [(b"Authorization", f"Bearer {api_key}".encode())],
        timeout=httpx.Timeout(None, connect=CONNECT_S),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=IDLE_S),
    )


async def find_model(client: httpx.AsyncClient) -> str:
    """The name of the one model that the server has. Raises `EndpointError`."""
    response = await _call(client, "GET", "models")
    try:
        names = [str(model["id"]) for model in response.json()["data"]]
    except (ValueError, TypeError, LookupError) as error:
        raise EndpointError(f"{response.url} does not list models in OpenAI's form: give --model") from error
    if not names:
        raise EndpointError(f"{response.url} lists no model: give --model")
    if len(names) > 1:
        raise EndpointError(f"{response.url} lists {len(names)} models ({', '.join(names[:5])}): choose with --model")
    return names[0]


async def random_prompts(client: httpx.AsyncClient, endpoint: Endpoint, length: int, seed: int) -> Prompts:
    """Prompts of `length` tokens: as token ids if the server takes them, or else as text."""
    if not endpoint.chat:
        for first, last in TOKEN_RANGES:
            probe = [first, last] * (PROBE_TOKENS // 2)
            response = await _probe(client, endpoint, Prompt(probe))
            if response.status_code == httpx.codes.OK and _is_count(_prompt_tokens(response), PROBE_TOKENS):
                return TokenPrompts(length, seed, first, last)
    return TextPrompts(await _words_of(client, endpoint, length), seed)


async def _words_of(client: httpx.AsyncClient, endpoint: Endpoint, length: int) -> int:
    """How many words make `length` tokens, from two short prompts; without their usage: a word is a token."""
    few, many = 8, 40
    counts = []
    for num_words in (few, many):
        response = await _probe(client, endpoint, TextPrompts(num_words, seed=0).prompt(0))
        if response.status_code != httpx.codes.OK:
            raise EndpointError(f"the server refuses a short prompt: {describe(response)}; {LEAVE_OUT}")
        counts.append(_prompt_tokens(response) or 0)
    if counts[1] <= counts[0]:
        return length
    tokens_a_word = (counts[1] - counts[0]) / (many - few)
    return max(1, round(few + (length - counts[0]) / tokens_a_word))


def _is_count(counted: int | None, tokens: int) -> bool:
    """Whether a server that counted so many tokens, or does not count, took these for tokens and not for text."""
    return counted is None or tokens <= counted <= tokens + MARKS


def _prompt_tokens(response: httpx.Response) -> int | None:
    try:
        counted = (response.json().get("usage") or {}).get("prompt_tokens")
    except (ValueError, AttributeError) as error:
        raise EndpointError(f"{response.url} does not answer in OpenAI's form: {shorten(response.text)}") from error
    return counted if isinstance(counted, int) and counted > 0 else None


async def _probe(client: httpx.AsyncClient, endpoint: Endpoint, prompt: Prompt) -> httpx.Response:
    """The answer to a request for one token; also one that refuses this kind of prompt."""
    body = endpoint.body(prompt, 1, stream=False)
    return await _call(client, "POST", endpoint.path, body, allowed=(httpx.codes.OK, *REFUSES_INPUT))


async def _call(
    client: httpx.AsyncClient,
    method: str,
    path: str,
    body: Mapping[str, Any] | None = None,
    allowed: tuple[int, ...] = (httpx.codes.OK,),
) -> httpx.Response:
    try:
        response = await client.request(method, path, json=body, timeout=PROBE_S)
    except httpx.HTTPError as error:
        raise EndpointError(
            f"nothing answers at {client.base_url} ({type(error).__name__}: {error}): start the server, or correct "
            f"--base-url"
        ) from error
    if response.status_code not in allowed:
        raise EndpointError(f"{method} {response.url}: {describe(response)}{_advice(response.status_code)}")
    return response


def _advice(status: int) -> str:
    if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        return "; give --api-key"
    if status == httpx.codes.NOT_FOUND:
        return "; correct --base-url or --model, or try --chat if it has chat completions only"
    return ""


def describe(response: httpx.Response) -> str:
    """A response that is an error, in a line: its status, and the message in it. Its body must have been read."""
    try:
        message = error_message(response.json())
    except ValueError:
        message = response.text
    return f"HTTP {response.status_code}: {shorten(message)}"


def error_message(body: Any) -> str:
    """The message in an error's JSON, as OpenAI has it, or in a form that other servers have."""
    for name in ("error", "detail", "message"):
        if isinstance(body, dict) and body.get(name):
            body = body[name]
    return str(body)


def shorten(text: str, longest: int = 200) -> str:
    """A text on one line."""
    line = " ".join(text.split())
    return line if len(line) <= longest else f"{line[:longest]}..."
