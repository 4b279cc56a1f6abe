"""Clients that ask for four times what a server takes, and for much that it must refuse; what came of it is counted."""

import asyncio
import itertools
import json
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from tests.server.serving import MODEL, PATIENCE_S

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
MALFORMED = (  # bodies, each refused with 400
    b"",
    b"{",
    b"[]",
    b'{"prompt": 5}',
    b'{"prompt": [[1], 2]}',
    b'{"prompt": "a", "max_tokens": "many"}',
    b'{"prompt": "a", "max_tokens": -1}',
    b'{"prompt": "a", "temperature": 1e400}',
    b'{"prompt": "a", "n": 1000000}',
    b'{"prompt": [99999999]}',
    b'{"prompt": "\xff"}',
    b'{"messages": "hello"}',
    b"[" * 5000,
)
KINDS = ("whole", "streamed", "chat", "left", "refused", "malformed", "too long")  # what comes of requests
PAUSE_S = 0.4  # of a client that was refused: clients share the interpreter with the server, and would starve it


class Question(NamedTuple):
    """What is asked greedily, and the answer that a request gets that has the server to itself."""

    prompt: str
    max_tokens: int
    answer: str


@dataclass
class Tally:
    """What became of the requests, by kind; and what should not have been."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def check(self, holds: bool, what: str) -> None:
        if not holds:
            self.wrong.append(what[:300])


class Memory:
    """The process's resident memory in bytes, and its open files, over time. Linux only: elsewhere there is none."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, int]] = []  # moment, bytes

    async def watch(self) -> None:
        while Path("/proc/self/statm").exists():
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.seen.append((time.monotonic(), pages * os.sysconf("SC_PAGE_SIZE")))
            await asyncio.sleep(0.1)

    def peaks(self, parts: int) -> list[int]:
        """Of each of so many equal parts of the time."""
        if not self.seen:
            return [0] * parts
        first, last = self.seen[0][0], self.seen[-1][0] + 1e-9
        place = [(int((moment - first) / (last - first) * parts), size) for moment, size in self.seen]
        return [max((size for at, size in place if at == part), default=0) for part in range(parts)]


class Clients:
    """A load on one server.

    Args:
        url: the server's.
        questions: what clients ask.
        count: how many ask at once, each one request after the other.
        seconds: after which nobody asks any more, once each kind of outcome was seen and `seen_all` says so.
        seen_all: whether the server did what it was to do under this load; waited for PATIENCE_S at most.
    """

    def __init__(
        self, url: str, questions: Sequence[Question], count: int, seconds: float, seen_all: Callable[[], bool]
    ) -> None:
        self.tally, self.memory = Tally(), Memory()
        self._url, self._questions, self._count = url, questions, count
        self._until = time.monotonic() + seconds
        self._seen_all = seen_all
        self._client: httpx.AsyncClient

    async def run(self) -> None:
        """Until every request has its answer."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._url, timeout=PATIENCE_S, limits=limits) as self._client:
            watching = asyncio.create_task(self.memory.watch())
            await asyncio.gather(*(self._ask_on(random.Random(number)) for number in range(self._count)))
            watching.cancel()

    async def _ask_on(self, choose: random.Random) -> None:
        kinds: dict[Callable[[random.Random], Awaitable[str]], int] = {
            self._whole: 40,
            self._streamed: 40,
            self._chat: 10,
            self._leave: 20,
            self._malformed: 10,
            self._too_long: 8,
        }
        while self._goes_on():
            kind = choose.choices(list(kinds), list(kinds.values()))[0]
            try:
                came = await kind(choose)
            except Exception as error:
                self.tally.wrong.append(f"{kind!r}: {error!r}")
                return
            self.tally.counts[came] += 1
            if came == "refused":
                await asyncio.sleep(PAUSE_S * (1 + choose.random()))

    def _goes_on(self) -> bool:
        over_by = time.monotonic() - self._until
        if over_by < 0 or over_by > PATIENCE_S:
            return over_by < 0
        return not (all(self.tally.counts[kind] for kind in KINDS) and self._seen_all())

    async def _whole(self, choose: random.Random) -> str:
        """One answer or two, perhaps urgent."""
        question = choose.choice(self._questions)
        count = choose.choice((1, 1, 2))
        response = await self._client.post(COMPLETIONS, json=self._body(question, choose) | {"n": count})
        if response.status_code == 429:
            return self._refused(response)
        texts = [choice["text"] for choice in response.json()["choices"]]
        self.tally.check(texts == [question.answer] * count, f"{texts} instead of {question}")
        return "whole"

    async def _streamed(self, choose: random.Random) -> str:
        question = choose.choice(self._questions)
        response = await self._client.post(COMPLETIONS, json=self._body(question, choose) | {"stream": True})
        if response.status_code == 429:
            return self._refused(response)
        *events, end = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        text = "".join(json.loads(event)["choices"][0]["text"] for event in events)
        self.tally.check((text, end) == (question.answer, "[DONE]"), f"{text!r} instead of {question}")
        return "streamed"

    async def _chat(self, choose: random.Random) -> str:
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": choose.randrange(1, 9)}
        response = await self._client.post(CHAT, json=body)
        if response.status_code == 429:
            return self._refused(response)
        self.tally.check(response.status_code == 200, response.text)
        return "chat"

    async def _leave(self, choose: random.Random) -> str:
        """At some moment: while it waits, reads or answers."""
        body = self._body(choose.choice(self._questions), choose) | {"max_tokens": 200, "stream": choose.random() < 0.5}
        try:
            async with asyncio.timeout(choose.random() / 5):
                response = await self._client.post(COMPLETIONS, json=body)
        except TimeoutError:
            return "left"
        return self._refused(response) if response.status_code == 429 else "done before it left"

    async def _malformed(self, choose: random.Random) -> str:
        body, path = choose.choice(MALFORMED), choose.choice((COMPLETIONS, CHAT))
        response = await self._client.post(path, content=body, headers=JSON)
        if response.status_code == 429:
            return self._refused(response)
        told = response.json()["error"]
        self.tally.check(response.status_code == 400 and bool(told["message"]), f"{body[:50]!r}: {response.text}")
        return "malformed"

    async def _too_long(self, choose: random.Random) -> str:
        response = await self._client.post(COMPLETIONS, json={"prompt": "x" * choose.randrange(512, 5000)})
        if response.status_code == 429:
            return self._refused(response)
        told = response.json()["error"]
        self.tally.check((response.status_code, told["code"]) == (400, "context_length_exceeded"), response.text)
        return "too long"

    def _body(self, question: Question, choose: random.Random) -> dict[str, Any]:
        asked = {"model": MODEL, "prompt": question.prompt, "max_tokens": question.max_tokens, "temperature": 0}
        return asked | {"priority": choose.choice((0, 0, 0, -1, 3))}

    def _refused(self, response: httpx.Response) -> str:
        told = response.json()["error"]
        clear = (
            told["code"] == "queue_full" and "try again later" in told["message"] and "retry-after" in response.headers
        )
        self.tally.check(clear, response.text)
        return "refused"


def mixed_questions(answer: Callable[[str, int], str]) -> list[Question]:
    """Prompts and answers, short and long."""
    asked = itertools.product(("a", "short one", "y" * 70, "long " * 50), (1, 7, 30))
    return [Question(prompt, max_tokens, answer(prompt, max_tokens)) for prompt, max_tokens in asked]
