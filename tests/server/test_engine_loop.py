"""The engine on its own thread: texts as alone, refusals, cancellation at any moment, failures, and stopping."""

import asyncio
import time
from typing import Any

import pytest
import torch

from hisparse.checkpoint import Loaded
from hisparse.engine import Engine, FinishReason, Request
from hisparse.errors import ModelOutputError, NeverFitsError
from hisparse.server.engine_loop import EngineLoop
from hisparse.server.errors import NotServingError, QueueFullError
from hisparse.server.generation import Answers, Job, Piece
from tests.server.serving import CONTEXT, SlowEngine, alone, assert_nothing_left, job_of, new_engine, poison, wait_until


async def text_of(answers: Answers) -> str:
    return "".join([piece.text async for piece in answers.pieces()])


async def ask(loop: EngineLoop, *jobs: Job) -> list[list[Piece]]:
    answers = await loop.submit(jobs)
    pieces = [piece async for piece in answers.pieces()]
    return [[piece for piece in pieces if piece.job == index] for index in range(len(jobs))]


def assert_cancelled(*calls: Answers) -> None:
    """Ended by the cancellation, and not by having come to its own end."""
    for generation in (generation for answers in calls for generation in answers.generations):
        request = generation.request
        assert request is not None
        wait_until(lambda request=request: request.finish_reason is not None)  # type: ignore[misc]
        assert request.finish_reason is FinishReason.CANCELLED


def test_many_at_once_are_each_as_alone(loop: EngineLoop, loaded: Loaded) -> None:
    prompts = [f"Request number {i}, " + "long " * (7 * i) for i in range(12)]
    jobs = [job_of(loaded, prompt, max_tokens=5 + 3 * i) for i, prompt in enumerate(prompts)]

    async def all_at_once() -> list[list[list[Piece]]]:
        return await asyncio.gather(*(ask(loop, job) for job in jobs))

    for i, [pieces] in enumerate(asyncio.run(all_at_once())):
        assert "".join(piece.text for piece in pieces) == alone(loaded, jobs[i].prompt, max_tokens=5 + 3 * i)
        assert pieces[-1].finish_reason is FinishReason.LENGTH
        assert pieces[-1].num_tokens == 5 + 3 * i
        assert all(piece.finish_reason is None for piece in pieces[:-1])


def test_several_texts_of_one_call(loop: EngineLoop, loaded: Loaded) -> None:
    texts = asyncio.run(ask(loop, *(job_of(loaded, prompt, max_tokens=9) for prompt in ("one", "two"))))
    for prompt, pieces in zip(("one", "two"), texts, strict=True):
        assert "".join(piece.text for piece in pieces) == alone(
            loaded, list(loaded.tokenizer.encode(prompt)), max_tokens=9
        )


def test_refused_prompts_leave_nothing(loop: EngineLoop, loaded: Loaded) -> None:
    good = job_of(loaded, "good", max_tokens=4)
    with pytest.raises(ValueError, match="512"):
        asyncio.run(ask(loop, good, Job([1] * CONTEXT, good.params)))
    with pytest.raises(ValueError, match="empty"):
        asyncio.run(ask(loop, good, Job([], good.params)))
    with pytest.raises(ValueError, match="ask for fewer"):
        asyncio.run(ask(loop, *[good] * 68))


def test_what_never_fits_is_refused_with_the_numbers(loaded: Loaded) -> None:
    from hisparse.config import HiSparseConfig

    config = HiSparseConfig(top_k=32, device_buffer_size=48, max_running_requests=1, host_to_device_ratio=4)
    loop = EngineLoop(new_engine(loaded, config))
    loop.start()
    with pytest.raises(NeverFitsError, match="192 rows"):
        asyncio.run(ask(loop, Job([1] * 100, job_of(loaded, "a", max_tokens=200).params)))
    assert_nothing_left(loop)
    asyncio.run(loop.stop(timeout_s=0))


def test_the_queue_has_a_limit(loaded: Loaded) -> None:
    loop = EngineLoop(new_engine(loaded), max_waiting=2)
    SlowEngine(loop.engine)
    loop.start()
    job = job_of(loaded, "a", max_tokens=20)

    async def one_too_many() -> None:
        taken = [await loop.submit([job]) for _ in range(5)]
        with pytest.raises(QueueFullError, match="5 of at most 5"):
            await loop.submit([job])
        assert len({await text_of(answers) for answers in taken}) == 1
        await text_of(await loop.submit([job]))

    asyncio.run(one_too_many())
    assert_nothing_left(loop)
    asyncio.run(loop.stop(timeout_s=0))


@pytest.mark.parametrize("tokens_before", [0, 1, 5])
def test_cancelled_after_some_tokens(loop: EngineLoop, loaded: Loaded, tokens_before: int) -> None:
    SlowEngine(loop.engine, seconds=0.002)

    async def leave_early() -> tuple[str, Answers]:
        other = await loop.submit([job_of(loaded, "another", max_tokens=30)])
        answers = await loop.submit([job_of(loaded, "leaves", max_tokens=400)])
        if tokens_before:
            pieces = answers.pieces()
            while (await anext(pieces)).num_tokens < tokens_before:
                pass
            await pieces.aclose()
        answers.cancel()
        answers.cancel()
        return await text_of(other), answers

    text, left = asyncio.run(leave_early())
    assert_cancelled(left)
    assert text == alone(loaded, job_of(loaded, "another").prompt, max_tokens=30)


def test_cancelled_while_waiting_and_while_prefilling(loop: EngineLoop, loaded: Loaded) -> None:
    SlowEngine(loop.engine)

    async def leave() -> list[Answers]:
        long = job_of(loaded, "x" * 400, max_tokens=50)
        submitted = [await loop.submit([long]) for _ in range(6)]  # three run, the first of them prefilling
        for answers in submitted:
            answers.cancel()
        waiting = asyncio.create_task(loop.submit([long]))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return submitted

    assert_cancelled(*asyncio.run(leave()))


def test_cancelled_while_retracted(loop: EngineLoop, loaded: Loaded) -> None:
    retracted: list[Request] = []

    async def leave() -> Answers:
        answers = await loop.submit([job_of(loaded, "retracted", max_tokens=400)])
        request = answers.generations[0].request
        assert request is not None
        pieces = answers.pieces()
        await anext(pieces)
        loop._inbox.put(lambda: loop.engine.retract(request))
        loop._inbox.put(lambda: retracted.extend(loop.engine.scheduler.retracted))
        loop._inbox.put(answers.cancel)
        return answers

    assert_cancelled(asyncio.run(leave()))
    assert len(retracted) == 1


def test_a_closed_asyncio_loop_disturbs_nobody(loop: EngineLoop, loaded: Loaded) -> None:
    SlowEngine(loop.engine, seconds=0.002)

    async def forget() -> None:
        await loop.submit([job_of(loaded, "forgotten", max_tokens=40)])

    asyncio.run(forget())
    assert_nothing_left(loop)


def test_nan_ends_one_request_alone(loop: EngineLoop, loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(loop.engine, monkeypatch, 100, 100)

    async def both() -> str:
        good, bad = await asyncio.gather(
            loop.submit([job_of(loaded, "short", max_tokens=60)]),
            loop.submit([job_of(loaded, "y" * 80, max_tokens=60)]),
        )
        with pytest.raises(ModelOutputError, match="position 10"):
            await text_of(bad)
        return await text_of(good)

    assert asyncio.run(both()) == alone(loaded, job_of(loaded, "short").prompt, max_tokens=60)


def test_a_forward_without_output_ends_its_requests_and_is_not_tried_again(
    loop: EngineLoop, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = loop.engine.runner.prefill

    def broken(chunk: Any) -> torch.Tensor | None:
        if len(chunk.tokens) == 50:
            raise ModelOutputError("the indexer's scores are NaN")
        return prefill(chunk)

    monkeypatch.setattr(loop.engine.runner, "prefill", broken)
    with pytest.raises(ModelOutputError, match="scores are NaN"):
        asyncio.run(ask(loop, job_of(loaded, "z" * 50, max_tokens=9)))
    assert len(asyncio.run(ask(loop, job_of(loaded, "short", max_tokens=9)))) == 1


def test_a_cache_that_others_fill_ends_all_and_hangs_nobody(loop: EngineLoop, loaded: Loaded) -> None:
    for _ in range(3):
        loop.engine.runner.cache.admit(64)
    with pytest.raises(NotServingError, match="find no room although nothing runs"):
        asyncio.run(ask(loop, job_of(loaded, "a", max_tokens=9)))


def test_a_fatal_error_ends_all_and_says_so(loop: EngineLoop, loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> torch.Tensor:
        raise RuntimeError("the GPU fell off the bus")

    monkeypatch.setattr(loop.engine.runner, "decode", broken)

    async def both() -> None:
        job = job_of(loaded, "a", max_tokens=9)
        results = await asyncio.gather(ask(loop, job), ask(loop, job), return_exceptions=True)
        for result in results:
            assert isinstance(result, NotServingError)
            assert "fell off the bus" in str(result)
        with pytest.raises(NotServingError, match="fell off the bus"):
            await loop.submit([job])

    asyncio.run(both())
    assert loop.num_unfinished == 0


def test_stopping_lets_running_requests_finish(loop: EngineLoop, loaded: Loaded) -> None:
    SlowEngine(loop.engine, seconds=0.002)
    job = job_of(loaded, "a", max_tokens=30)

    async def stop_under_load() -> list[str]:
        taken = [await loop.submit([job]) for _ in range(5)]
        texts = asyncio.gather(*(text_of(answers) for answers in taken))
        loop.begin_stop(timeout_s=60)
        with pytest.raises(NotServingError, match="shutting down"):
            await loop.submit([job])
        await loop.stop(timeout_s=60)
        return await texts

    assert set(asyncio.run(stop_under_load())) == {alone(loaded, job.prompt, max_tokens=30)}
    assert_nothing_left(loop)


def test_stopping_cuts_off_what_takes_too_long(loop: EngineLoop, loaded: Loaded) -> None:
    SlowEngine(loop.engine, seconds=0.01)

    async def stop() -> None:
        answers = await loop.submit([job_of(loaded, "a", max_tokens=400)])
        await loop.stop(timeout_s=0.1)
        with pytest.raises(NotServingError, match="before this request was finished"):
            await text_of(answers)

    asyncio.run(stop())
    assert_nothing_left(loop)


def test_idle_takes_no_steps(loop: EngineLoop, loaded: Loaded) -> None:
    counted = CountedSteps(loop.engine)
    asyncio.run(ask(loop, job_of(loaded, "a", max_tokens=2)))
    wait_until(lambda: loop.engine.scheduler.is_idle)
    time.sleep(0.1)
    before = counted.num
    time.sleep(0.3)
    assert counted.num == before > 0


def test_what_was_finished_before_a_fatal_error_is_whole(
    loop: EngineLoop, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that finishes one text is followed by one that cannot be."""
    step, short = loop.engine.step, job_of(loaded, "a", max_tokens=4)

    def step_until_one_is_finished(*given: Any) -> list[Request]:
        if len(loop.engine._requests) == 1:
            raise RuntimeError("the GPU fell off the bus")
        return step(*given)

    async def both() -> list[str | BaseException]:
        answers = [await loop.submit([short]), await loop.submit([job_of(loaded, "b", max_tokens=60)])]
        monkeypatch.setattr(loop.engine, "step", step_until_one_is_finished)
        return await asyncio.gather(*map(text_of, answers), return_exceptions=True)

    SlowEngine(loop.engine)
    text, error = asyncio.run(both())
    assert text == alone(loaded, short.prompt, max_tokens=4)
    assert isinstance(error, NotServingError)


def test_a_text_that_failed_before_a_fatal_error_is_told_so(
    loop: EngineLoop, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both in one step: the one without output has ended by then, and the engine says something else."""
    step = loop.engine.step

    def step_of_two_faults(*given: Any) -> list[Request]:
        try:
            return step(*given)
        except ModelOutputError as error:
            raise RuntimeError("the GPU fell off the bus") from error

    monkeypatch.setattr(loop.engine, "step", step_of_two_faults)
    poison(loop.engine, monkeypatch, 20, 30)

    async def both() -> list[Any]:
        asked = ask(loop, job_of(loaded, "y" * 20, max_tokens=9)), ask(loop, job_of(loaded, "b", max_tokens=200))
        return [*await asyncio.gather(*asked, return_exceptions=True)]

    for error in asyncio.run(both()):
        assert isinstance(error, NotServingError)
        assert "fell off the bus" in str(error)


class CountedSteps:
    """Counts an engine's steps."""

    def __init__(self, engine: Engine) -> None:
        self.num = 0
        self._step = engine.step
        engine.step = self.step  # type: ignore[method-assign, assignment]

    def step(self, *given: Any) -> list[Request]:
        self.num += 1
        return self._step(*given)
