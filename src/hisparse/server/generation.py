"""Answers on their way from the engine's thread to an asyncio caller.

A call asks for one text or for several at once (prompts, choices); each is a `Generation`, and together they are
the caller's `Answers`. The engine loop moves generations forward; whoever iterates over the answers gets pieces.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hisparse.engine.logprobs import ChosenLogprob
from hisparse.engine.request import FinishReason, Request, SamplingParams


class Job(NamedTuple):
    """One text that is asked for."""

    prompt: list[int]  # tokens
    params: SamplingParams
    priority: int = 0  # the lower number is served first


class Piece(NamedTuple):
    """More of one text."""

    job: int  # which one of the call's jobs
    text: str
    num_tokens: int  # produced so far, a final stop token included
    finish_reason: FinishReason | None
    logprobs: Sequence[ChosenLogprob] = ()  # of the tokens that the text begins with, if they were asked for


News = Piece | Exception | None  # more text, the error that ended everything, or: the jobs are accepted


@dataclass(eq=False)
class Generation:
    """One job in the engine. Only the engine's thread changes it."""

    index: int
    job: Job
    answers: "Answers"
    asked_at: float  # seconds, time.perf_counter
    request: Request | None = None  # None until the engine has taken it
    first_token_at: float | None = None
    num_seen: int = 0  # tokens
    num_shown: int = 0  # characters
    num_weighed: int = 0  # tokens whose log-probabilities were told

    def advance(self) -> Piece | None:
        """What came since the last call; None if there is nothing to tell."""
        request = self.request
        if request is None or (len(request.output) == self.num_seen and request.finish_reason is None):
            return None
        self.num_seen = len(request.output)
        settled = request.stream.settled
        text, self.num_shown = settled[self.num_shown :], len(settled)
        if not text and request.finish_reason is None:
            return None
        return Piece(self.index, text, self.num_seen, request.finish_reason, self._logprobs(request))

    def _logprobs(self, request: Request) -> Sequence[ChosenLogprob]:
        """Of the tokens whose text begins in what is shown; at the end of all, but for what a stop string cut off."""
        new = request.logprobs[self.num_weighed :]
        if request.finish_reason is None or request.stream.stopped:
            new = [one for one in new if one.offset < self.num_shown]
        self.num_weighed += len(new)
        return new


class Answers:
    """The texts of one call, as one stream of pieces. Belongs to the asyncio loop in which it was made.

    Args:
        jobs: what to generate.
        cancel: tells the engine loop that nobody wants these answers any more.
    """

    def __init__(self, jobs: Sequence[Job], cancel: "Callable[[Answers], None]") -> None:
        now = time.perf_counter()
        self.loop = asyncio.get_running_loop()
        self.generations = [Generation(index, job, self, asked_at=now) for index, job in enumerate(jobs)]
        self._mailbox: asyncio.Queue[News] = asyncio.Queue()
        self._cancel = cancel
        self._num_unfinished = len(self.generations)

    def deliver(self, news: News) -> None:
        """Take news, on the asyncio loop."""
        self._mailbox.put_nowait(news)

    async def accepted(self) -> None:
        """Wait until the engine has taken the jobs. Raises what it refused them with."""
        news = await self._mailbox.get()
        if isinstance(news, Exception):
            raise news

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Every piece of every text, in the order of their making, until all are finished.

        Raises `ModelOutputError` if the model produced nothing that can be sampled from, and `NotServingError` if
        the server stops first. Leaving early cancels what is left.
        """
        try:
            while self._num_unfinished:
                news = await self._mailbox.get()
                if isinstance(news, Exception):
                    raise news
                if news is not None:
                    self._num_unfinished -= news.finish_reason is not None
                    yield news
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Nobody wants these answers any more. May be called at any time, and more than once."""
        if self._num_unfinished:
            self._num_unfinished = 0
            self._cancel(self)
