"""Outputs do not depend on load: 200 requests of mixed lengths and priorities, while others leave.

Running ones are retracted all the time, for those that matter more and for no reason; prompts are read beside decodes.
"""

import asyncio
import random

from hisparse.checkpoint import Loaded
from hisparse.engine import SamplingParams
from hisparse.engine.batch import Batch
from hisparse.server.engine_loop import EngineLoop
from hisparse.server.generation import Job
from tests.server.serving import assert_nothing_left, new_engine

NUM_REQUESTS = 200
NUM_LEAVING = 60
CLIENTS = 20
USUAL = 7  # the priority of most; the others come when they like


def mixed_jobs(count: int, seed: int) -> list[Job]:
    choose = random.Random(seed)
    return [
        Job(
            [choose.randrange(256) for _ in range(choose.choice((1, 5, 40, 64, 65, 150, 260)))],
            SamplingParams(max_tokens=choose.randrange(1, 16)),
            priority=choose.choice((0, 3, USUAL, USUAL, USUAL)),
        )
        for _ in range(count)
    ]


def texts_alone(loaded: Loaded, jobs: list[Job]) -> list[str]:
    engine, texts = new_engine(loaded), []
    for job in jobs:
        request = engine.submit(*job)
        engine.run()
        texts.append(request.text)
    return texts


async def finish(loop: EngineLoop, job: Job, gate: asyncio.Semaphore, after_s: float) -> str:
    async with gate:
        await asyncio.sleep(after_s)
        answers = await loop.submit([job])
        return "".join([piece.text async for piece in answers.pieces()])


async def leave(loop: EngineLoop, job: Job, gate: asyncio.Semaphore, after_s: float) -> None:
    async with gate:
        answers = await loop.submit([job])
        await asyncio.sleep(after_s)
        answers.cancel()


class Churn:
    """Retracts now and then, and counts what happens."""

    def __init__(self, loop: EngineLoop, choose: random.Random) -> None:
        self.num_retracted = 0  # here, and not by the scheduler
        self.num_from_prompts = 0  # of those: in the middle of their prompts
        self.num_mixed = 0  # steps of a decode and a chunk
        self._loop, self._choose = loop, choose
        self._schedule = loop.engine.scheduler.schedule
        loop.engine.scheduler.schedule = self._count  # type: ignore[method-assign]

    async def retract_now_and_then(self) -> None:
        while True:
            self._loop._inbox.put(self._retract)
            await asyncio.sleep(0.02)

    def _retract(self) -> None:
        engine = self._loop.engine
        if engine.scheduler.running:
            request = self._choose.choice(engine.scheduler.running)
            self.num_from_prompts += 0 < request.num_prefilled < len(request.prompt)
            engine.retract(request)
            self.num_retracted += 1

    def _count(self) -> list[Batch]:
        batches = self._schedule()
        self.num_mixed += len({type(batch) for batch in batches}) == 2
        return batches


def test_texts_of_a_churning_server_are_those_of_each_request_alone(loop: EngineLoop, loaded: Loaded) -> None:
    jobs, choose = mixed_jobs(NUM_REQUESTS, seed=1), random.Random(2)
    churn = Churn(loop, choose)

    async def all_at_once() -> list[str]:
        gate = asyncio.Semaphore(CLIENTS)
        retracting = asyncio.create_task(churn.retract_now_and_then())
        leaving = [leave(loop, job, gate, choose.random() / 10) for job in mixed_jobs(NUM_LEAVING, seed=3)]
        urgent = asyncio.Semaphore(2)
        finishing = [
            finish(loop, job, gate, 0) if job.priority == USUAL else finish(loop, job, urgent, choose.random() / 10)
            for job in jobs
        ]
        both = [*finishing, *leaving]
        order = choose.sample(range(len(both)), len(both))
        results = dict(zip(order, await asyncio.gather(*(both[i] for i in order)), strict=True))
        retracting.cancel()
        return [str(results[i]) for i in range(len(jobs))]

    texts = asyncio.run(all_at_once())
    assert_nothing_left(loop)
    assert churn.num_retracted > 0
    assert loop.engine.scheduler.num_retractions > churn.num_retracted  # for those that matter more
    assert churn.num_from_prompts > 0
    assert churn.num_mixed > 0
    assert texts == texts_alone(loaded, jobs)
