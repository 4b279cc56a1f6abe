"""What is used of OpenAI's requests for completions and chat completions, checked once, here.

Fields that are not known are ignored, as other servers with this interface do, so that any client works. A known
field with a wrong type or an impossible value is refused, and so is one that would change the answer and is not
supported: an answer that quietly disregards what was asked for would be worse than none.
"""

from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError, model_validator
from pydantic_core import ErrorDetails, from_json

from hisparse.engine.request import SamplingParams
from hisparse.server.errors import ApiError, shown

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_LOGPROBS = 5  # of a completion, OpenAI's
MAX_TOP_LOGPROBS = 20  # of a chat, OpenAI's
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
SEED_RANGE = 2**63
PRIORITY_RANGE = 2**31

# Not supported, and the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "tools": ([],),
    "functions": ([],),
    "response_format": ({"type": "text"},),
}


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _as_prompts(value: object) -> list[str | list[int]]:
    """A prompt, or several, as text or as tokens."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _are_tokens(value):
            return [value]
        if all(isinstance(prompt, str) for prompt in value) or all(_are_tokens(prompt) for prompt in value):
            return value
    raise ValueError("it must be a string, a list of strings, a list of tokens, or a list of lists of tokens")


def _are_tokens(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _as_text(value: object) -> object:
    """A message's content: text, or parts that are all text."""
    if not isinstance(value, list):
        return value
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError('every part of the content must be {"type": "text", "text": ...}: this is a text model')
    return "".join(part["text"] for part in value)


class _Model(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, protected_namespaces=())


class StreamOptions(_Model):
    """How to stream."""

    include_usage: bool | None = None


class GenerateRequest(_Model):
    """What both kinds of request have."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None  # not OpenAI's; 0: all tokens
    priority: Annotated[int, Field(ge=-PRIORITY_RANGE, lt=PRIORITY_RANGE)] | None = None  # not OpenAI's; lower is first
    seed: Annotated[int, Field(ge=-SEED_RANGE, lt=SEED_RANGE)] | None = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]] | None, Field(max_length=MAX_STOP_STRINGS), BeforeValidator(_as_list)
    ] = None
    ignore_eos: bool | None = None  # not OpenAI's; true: only a limit or a stop string ends the text
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def wanted_tokens(self) -> int | None:
        """The most tokens to produce; None: as many as there is room for."""
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """So many likeliest tokens with each token's log-probability; None: nothing of the kind."""
        return None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self, choice: int, room: int) -> SamplingParams:
        """How to sample one choice, of which each has a seed of its own. `room`: the most tokens there can be."""
        seed = None if self.seed is None else (self.seed + choice) % SEED_RANGE
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            seed=seed,
            max_tokens=min(self.wanted_tokens or room, room),
            stop=tuple(self.stop or ()),
            logprobs=self.num_logprobs,
            ignore_eos=bool(self.ignore_eos),
        )


class CompletionRequest(GenerateRequest):
    """The body of /v1/completions."""

    prompt: Annotated[list[str | list[int]], PlainValidator(_as_prompts)]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def wanted_tokens(self) -> int | None:
        """The most tokens to produce."""
        return self.max_tokens or DEFAULT_COMPLETION_TOKENS

    @property
    def num_logprobs(self) -> int | None:
        """So many likeliest tokens with each token's log-probability; None: nothing of the kind."""
        return self.logprobs


class Message(_Model):
    """One message of a chat."""

    role: Annotated[str, Field(min_length=1)]
    content: Annotated[str, BeforeValidator(_as_text)]


class ChatRequest(GenerateRequest):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            message = f"top_logprobs needs logprobs to be true, got {self.logprobs!r}"
            raise ApiError(message, param="top_logprobs")
        return self

    @property
    def wanted_tokens(self) -> int | None:
        """The most tokens to produce; None: as many as there is room for."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """So many likeliest tokens with each token's log-probability; None: nothing of the kind."""
        return (self.top_logprobs or 0) if self.logprobs else None


Body = TypeVar("Body", bound=GenerateRequest)


def parse(kind: type[Body], body: bytes) -> Body:
    """A request's body. Raises `ApiError` that names the field, what was expected, and what came."""
    try:
        values = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(f"the body is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ApiError(f"the body must be a JSON object, got {shown(values)}")
    _refuse_unsupported(values)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _invalid(error.errors(include_url=False)[0]) from error


def _refuse_unsupported(values: dict[str, Any]) -> None:
    for name, harmless in UNSUPPORTED.items():
        value = values.get(name)
        if value is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in harmless):
            continue
        raise ApiError(
            f"{name} is not supported by this server, got {shown(value)}: leave it out",
            param=name,
            code="unsupported_parameter",
        )


def _invalid(error: ErrorDetails) -> ApiError:
    place = [str(part) for part in error["loc"] if not str(part).startswith(("list[", "function-"))]
    param = ".".join(place) or None
    if error["type"] == "missing":
        return ApiError(f"{param} is missing: it is required", param=param)
    message = error["msg"].removeprefix("Value error, ").replace("Input should", "it should")
    return ApiError(f"{param}: {message}, got {shown(error['input'])}", param=param)
