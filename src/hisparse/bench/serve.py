"""Load on a server of OpenAI's API, this package's or another: what it answers, how fast, and what it refuses.

serve_endpoint.py knows the server, serve_prompts.py makes prompts, serve_load.py decides when requests come,
serve_request.py sends one and times it, and serve_report.py adds the outcomes up.
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from hisparse.bench.provenance import commit_here
from hisparse.bench.serve_endpoint import LEAVE_OUT, Endpoint, EndpointError, find_model, open_client, random_prompts
from hisparse.bench.serve_load import Load
from hisparse.bench.serve_prompts import FilePrompts, Prompts, read_file
from hisparse.bench.serve_report import summarize
from hisparse.bench.serve_request import Failure, Outcome, ask

REFUSES_FIELDS = ("HTTP 400", "HTTP 422")  # how servers answer to fields that they do not know
WARM_UP = -1  # its number: no measured request has its prompt


@dataclass(frozen=True)
class Setup:
    """What to measure.

    Args:
        base_url: the server's, with or without /v1.
        load: how requests come.
        model: its name; None: the one that the server lists.
        api_key: sent as a bearer token.
        chat: ask for chat completions.
        input_tokens: length of random prompts; None: of a file.
        prompts_file: see serve_prompts.read_file.
        output_tokens: the most tokens of an answer, where the prompt does not say.
        seed: of random prompts.
        timeout_s: a request that takes longer has failed.
        extra: fields of every request; None leaves one out.
        warm_up: requests that are sent first, one by one, and not measured.
    """

    base_url: str
    load: Load
    model: str | None = None
    api_key: str | None = None
    chat: bool = False
    input_tokens: int | None = None
    prompts_file: Path | None = None
    output_tokens: int = 128
    seed: int = 0
    timeout_s: float = 600.0
    extra: Mapping[str, Any] = field(default_factory=dict)
    warm_up: int = 1

    def __post_init__(self) -> None:
        if (self.input_tokens is None) == (self.prompts_file is None):
            raise ValueError("prompts are random (--input-tokens) or from a file (--prompts): give one of them")
        for name, value in (("--input-tokens", self.input_tokens), ("--output-tokens", self.output_tokens)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not self.timeout_s > 0:
            raise ValueError(f"--timeout must be above 0 seconds, got {self.timeout_s}")
        if self.warm_up < 0:
            raise ValueError(f"--warm-up must be 0 or more requests, got {self.warm_up}")


def bench(setup: Setup, on_end: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Put the load on the server; the figures by name (see `summarize`). Ctrl-C ends it early, with what there is.

    Args:
        setup: what to measure.
        on_end: called after each request.

    Raises `EndpointError` if the server does not answer, or refuses the first request.
    """
    file = None if setup.prompts_file is None else read_file(setup.prompts_file)
    if file is not None and not setup.chat and any(prompt.is_messages for prompt in file.prompts):
        raise ValueError(f'--prompts {setup.prompts_file} has "messages": add --chat')
    return asyncio.run(_bench(setup, file, on_end))


async def _bench(setup: Setup, file: FilePrompts | None, on_end: Callable[[], None]) -> dict[str, Any]:
    async with open_client(setup.base_url, setup.api_key) as client:
        endpoint = Endpoint(setup.model or await find_model(client), setup.chat, setup.extra)
        prompts: Prompts = file or await random_prompts(client, endpoint, setup.input_tokens or 1, setup.seed)
        run = _Run(setup, client, endpoint, prompts, on_end)
        await run.warm_up()
        started = datetime.now(UTC)
        figures = await run.measure()
    return {
        "bench": "serve",
        "started": started.isoformat(timespec="seconds"),
        "client_commit": commit_here(),
        "base_url": str(client.base_url).rstrip("/"),
        "model": endpoint.model,
        "api": endpoint.path,
        "load": str(setup.load),
        "concurrency": setup.load.concurrency,
        "request_rate": setup.load.rate,
        "prompts": prompts.kind,
        "input_tokens": setup.input_tokens,
        "asked_output_tokens": setup.output_tokens,
        "seed": setup.seed,
        "extra": dict(setup.extra),
        **figures,
    }


def _advice(failure: Failure) -> str:
    return f"; {LEAVE_OUT}" if failure.kind in REFUSES_FIELDS else ""


class _Job(NamedTuple):
    body: bytes
    max_tokens: int


class _Run:
    """A load under way."""

    def __init__(
        self, setup: Setup, client: httpx.AsyncClient, endpoint: Endpoint, prompts: Prompts, on_end: Callable[[], None]
    ) -> None:
        self._setup, self._client, self._endpoint, self._prompts = setup, client, endpoint, prompts
        self._on_end = on_end
        self._outcomes: list[Outcome] = []

    async def warm_up(self) -> None:
        """What every server does slowly once. Raises `EndpointError` if it fails: then the load would as well."""
        for _ in range(self._setup.warm_up):
            outcome = await self._ask(self._prepare(WARM_UP), time.perf_counter(), [])
            if outcome.failure is not None:
                raise EndpointError(
                    f"the first request, which is not measured, failed already: {outcome.failure.kind}: "
                    f"{outcome.failure.message}{_advice(outcome.failure)}"
                )

    async def measure(self) -> dict[str, Any]:
        """The figures, also of a load that was interrupted."""
        interrupted = False
        began, worked = time.perf_counter(), time.process_time()
        try:
            await self._setup.load.run(self._prepare, self._send)
        except asyncio.CancelledError:  # by Ctrl-C
            interrupted = True
        until = time.perf_counter()
        busy = (time.process_time() - worked) / (until - began)
        return summarize(self._outcomes, until, interrupted=interrupted) | {"client_busy": busy}

    def _prepare(self, number: int) -> _Job:
        prompt = self._prompts.prompt(number)
        max_tokens = prompt.max_tokens or self._setup.output_tokens
        return _Job(json.dumps(self._endpoint.body(prompt, max_tokens)).encode(), max_tokens)

    async def _send(self, job: _Job, due_at: float) -> None:
        await self._ask(job, due_at, self._outcomes)
        self._on_end()

    async def _ask(self, job: _Job, due_at: float, outcomes: list[Outcome]) -> Outcome:
        outcome = Outcome(due_at, job.max_tokens)
        outcomes.append(outcome)  # before it is sent, so that none is lost
        await ask(self._client, self._endpoint.path, job.body, outcome, self._setup.timeout_s)
        return outcome
