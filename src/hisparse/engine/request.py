"""A request: what was asked, how to sample, and what has come out so far."""

from dataclasses import dataclass, field
from enum import Enum

from hisparse.engine.logprobs import ChosenLogprob
from hisparse.engine.text_stream import TextStream


@dataclass(frozen=True)
class SamplingParams:
    """How to choose each token, and when to stop.

    Args:
        temperature: 0 chooses the likeliest token (greedy); above 0 samples.
        top_p: sample among the likeliest tokens that together have this probability.
        top_k: sample among this many likeliest tokens; 0: all.
        seed: of this request's own random stream; None: different at every run.
        max_tokens: the most tokens to produce.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: tokens that end the text.
        ignore_eos: the model's own stop tokens do not end it.
        logprobs: note each token's log-probability and those of so many likeliest tokens; None: none.

    Raises:
        ValueError: a value out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name in ("top_k", "max_tokens"):
            if not isinstance(getattr(self, name), int):
                raise ValueError(f"the sampling {name} must be a whole number, got {getattr(self, name)!r}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 (greedy) or a positive number, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"the sampling top_k must be 0 (all tokens) or positive, got {self.top_k}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if any(not stop for stop in self.stop):
            raise ValueError("a stop string must not be empty")
        if self.logprobs is not None and self.logprobs < 0:
            raise ValueError(f"logprobs must be None or 0 and more likeliest tokens, got {self.logprobs}")


class RequestState(Enum):
    """Where a request stands with the scheduler."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    RETRACTED = "retracted"
    FINISHED = "finished"


class FinishReason(Enum):
    """Why a request ended."""

    STOP = "stop"  # a stop token or string
    LENGTH = "length"  # max_tokens, or the model's context
    CANCELLED = "cancelled"
    ERROR = "error"  # the model's output could not be sampled from


@dataclass(eq=False)
class Request:
    """One prompt on its way through the engine."""

    id: int
    prompt: list[int]  # tokens
    params: SamplingParams
    stream: TextStream
    priority: int = 0  # the lower number is served first
    state: RequestState = RequestState.WAITING
    num_prefilled: int = 0  # prompt tokens whose records are in the cache
    output: list[int] = field(default_factory=list)  # tokens, a final stop token included
    logprobs: list[ChosenLogprob] = field(default_factory=list)  # of each token but a final stop token, if asked for
    finish_reason: FinishReason | None = None

    @property
    def max_positions(self) -> int:
        """Positions that the cache must have room for."""
        return len(self.prompt) + self.params.max_tokens

    @property
    def text(self) -> str:
        """The output so far, without what a stop string cuts off."""
        return self.stream.text
