"""Answers on their way from the engine's thread to an asyncio caller.

A call asks for one text or for several at once (prompts, choices); each is a `Generation`, and together they are
the caller's `Answers`. The engine loop moves generations forward; whoever iterates over the answers gets pieces.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
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

    def followed_by(self, other: "Piece") -> "Piece":
        """Both as one."""
        return other._replace(text=self.text + other.text, logprobs=[*self.logprobs, *other.logprobs])


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
        if self.answers.at_once and request.finish_reason is None:
            return None
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
        at_once: each text is one piece, when it is finished.
    """

    def __init__(self, jobs: Sequence[Job], cancel: "Callable[[Answers], None]", *, at_once: bool = False) -> None:
        now = time.perf_counter()
        self.at_once = at_once
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

        What comes faster than it is taken comes in larger pieces.

        Raises `ModelOutputError` if the model produced nothing that can be sampled from, and `NotServingError` if
        the server stops first. Leaving early cancels what is left.
        """
        try:
            while self._num_unfinished > 0:
                for piece in _join(await self._all_news()):
                    self._num_unfinished -= piece.finish_reason is not None
                    yield piece
        finally:
            self.cancel()

    async def _all_news(self) -> list[News]:
        """Everything that has come, and at least one."""
        news = [await self._mailbox.get()]
        while not self._mailbox.empty():
            news.append(self._mailbox.get_nowait())
        return news

    def cancel(self) -> None:
        """Nobody wants these answers any more. May be called at any time, and more than once."""
        if self._num_unfinished:
            self._num_unfinished = 0
            self._cancel(self)


def _join(news: Sequence[News]) -> Iterator[Piece]:
    """The pieces, those of one text that follow each other joined. Raises the error after what came before it."""
    pieces: list[Piece] = []
    for one in news:
        if isinstance(one, Exception):
            yield from pieces
            raise one
        if one is None:
            continue
        if pieces and pieces[-1].job == one.job:
            pieces[-1] = pieces[-1].followed_by(one)
        else:
            pieces.append(one)
    yield from pieces
