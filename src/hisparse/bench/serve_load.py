"""How requests come: a fixed number at once (closed loop), or at random moments at a given rate (Poisson)."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

Job = TypeVar("Job")
Prepare = Callable[[int], Job]  # a request's number -> all that can be made before it is due
Send = Callable[[Job, float], Coroutine[Any, Any, None]]  # and when it is due (time.perf_counter)


@dataclass(frozen=True)
class Load:
    """How requests come, and when there are enough of them.

    Args:
        concurrency: closed loop: so many at once, each followed by the next.
        rate: Poisson: so many a second on average, whatever becomes of the earlier ones.
        requests: the most to send; None: no limit.
        duration_s: nothing is sent after so many seconds; None: no limit.
        seed: decides the moments of a Poisson load.
    """

    concurrency: int | None = None
    rate: float | None = None
    requests: int | None = None
    duration_s: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate is None):
            raise ValueError("a load has either a concurrency (closed loop) or a request rate (Poisson)")
        if self.concurrency is not None and self.concurrency < 1:
            raise ValueError(f"--concurrency must be at least 1, got {self.concurrency}")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise ValueError(f"--request-rate must be above 0 requests a second, got {self.rate}")
        if self.requests is not None and self.requests < 1:
            raise ValueError(f"--requests must be at least 1, got {self.requests}")
        if self.duration_s is not None and not 0 < self.duration_s < float("inf"):
            raise ValueError(f"--duration must be above 0 seconds, got {self.duration_s}")
        if self.requests is None and self.duration_s is None:
            raise ValueError("a load has an end: give --requests, --duration, or both")

    def __str__(self) -> str:
        if self.concurrency is not None:
            return f"closed loop, {self.concurrency} at once"
        return f"Poisson, {self.rate:g} requests/s"

    async def run(self, prepare: Prepare[Job], send: Send[Job]) -> None:
        """Send every request and wait for all of them."""
        jobs = map(prepare, self._numbers())  # each made when it is the next
        if self.rate is not None:
            await self._poisson(jobs, send, self.rate)
        else:
            await self._closed_loop(jobs, send, self.concurrency or 1)

    async def _closed_loop(self, jobs: Iterator[Job], send: Send[Job], concurrency: int) -> None:
        async def one_after_another() -> None:
            for job in jobs:  # shared: each takes the next
                await send(job, time.perf_counter())

        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, self.requests or concurrency)):
                group.create_task(one_after_another())

    async def _poisson(self, jobs: Iterator[Job], send: Send[Job], rate: float) -> None:
        gaps = Random(f"arrivals {self.seed}")
        due = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                due += gaps.expovariate(rate)
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                group.create_task(send(job, due))

    def _numbers(self) -> Iterator[int]:
        end = None if self.duration_s is None else time.perf_counter() + self.duration_s
        number = 0
        while (self.requests is None or number < self.requests) and (end is None or time.perf_counter() < end):
            yield number
            number += 1
