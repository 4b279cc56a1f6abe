"""Outputs do not depend on load: 200 requests of mixed lengths while others leave and running ones are retracted."""

import asyncio
import random

from hisparse.checkpoint import Loaded
from hisparse.engine import RequestState, SamplingParams
from hisparse.server.engine_loop import EngineLoop
from hisparse.server.generation import Job
from tests.server.serving import assert_nothing_left, new_engine

NUM_REQUESTS = 200
NUM_LEAVING = 60
CLIENTS = 20


def mixed_jobs(count: int, seed: int) -> list[Job]:
    choose = random.Random(seed)
    return [
        Job(
            [choose.randrange(256) for _ in range(choose.choice((1, 5, 40, 64, 65, 150)))],
            SamplingParams(max_tokens=choose.randrange(1, 16)),
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


async def finish(loop: EngineLoop, job: Job, gate: asyncio.Semaphore) -> str:
    async with gate:
        answers = await loop.submit([job])
        return "".join([piece.text async for piece in answers.pieces()])


async def leave(loop: EngineLoop, job: Job, gate: asyncio.Semaphore, after_s: float) -> None:
    async with gate:
        answers = await loop.submit([job])
        await asyncio.sleep(after_s)
        answers.cancel()


async def retract_now_and_then(loop: EngineLoop, choose: random.Random) -> None:
    def retract() -> None:
        decoding = [request for request in loop.engine.scheduler.running if request.state is RequestState.DECODING]
        if decoding:
            loop.engine.retract(choose.choice(decoding))

    while True:
        loop._inbox.put(retract)
        await asyncio.sleep(0.005)


def test_texts_of_a_churning_server_are_those_of_each_request_alone(loop: EngineLoop, loaded: Loaded) -> None:
    jobs, choose = mixed_jobs(NUM_REQUESTS, seed=1), random.Random(2)

    async def churn() -> list[str]:
        gate = asyncio.Semaphore(CLIENTS)
        retracting = asyncio.create_task(retract_now_and_then(loop, choose))
        leaving = [leave(loop, job, gate, choose.random() / 10) for job in mixed_jobs(NUM_LEAVING, seed=3)]
        finishing = [finish(loop, job, gate) for job in jobs]
        both = [*finishing, *leaving]
        order = choose.sample(range(len(both)), len(both))
        results = dict(zip(order, await asyncio.gather(*(both[i] for i in order)), strict=True))
        retracting.cancel()
        return [str(results[i]) for i in range(len(jobs))]

    texts = asyncio.run(churn())
    assert texts == texts_alone(loaded, jobs)
    assert_nothing_left(loop)
