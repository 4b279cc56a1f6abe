"""Answers on their way: whole or in pieces, and in larger pieces for those who take them slowly."""

import asyncio
from collections.abc import Sequence

import pytest

from hisparse.checkpoint import Loaded
from hisparse.engine.logprobs import ChosenLogprob
from hisparse.engine.request import FinishReason, SamplingParams
from hisparse.server.engine_loop import EngineLoop
from hisparse.server.errors import NotServingError
from hisparse.server.generation import Answers, Job, News, Piece
from tests.server.serving import alone, job_of

JOB = Job([1], SamplingParams())
END = FinishReason.LENGTH
A, B = ChosenLogprob(1, -0.5, (), 0), ChosenLogprob(2, -0.5, (), 1)


def delivered(num_jobs: int, *news: News) -> list[Piece]:
    """What somebody gets who looks when all of it has come."""

    async def take() -> list[Piece]:
        answers = Answers([JOB] * num_jobs, lambda answers: None)
        for one in news:
            answers.deliver(one)
        return [piece async for piece in answers.pieces()]

    return asyncio.run(take())


def test_what_was_not_taken_in_time_comes_together() -> None:
    pieces = (Piece(0, "a", 1, None, [A]), Piece(0, "b", 2, None, [B]), Piece(0, "", 3, END))
    assert delivered(1, *pieces) == [Piece(0, "ab", 3, END, [A, B])]


def test_texts_stay_apart() -> None:
    pieces = [Piece(0, "a", 1, None), Piece(1, "b", 1, None), Piece(0, "c", 2, END), Piece(1, "d", 2, END)]
    assert delivered(2, *pieces) == pieces


def test_an_error_comes_after_the_text_before_it() -> None:
    seen: list[Piece] = []

    async def take() -> None:
        answers = Answers([JOB], lambda answers: None)
        for news in (Piece(0, "a", 1, None), NotServingError("gone"), Piece(0, "b", 2, None)):
            answers.deliver(news)
        async for piece in answers.pieces():
            seen.append(piece)

    with pytest.raises(NotServingError, match="gone"):
        asyncio.run(take())
    assert seen == [Piece(0, "a", 1, None)]


def test_at_once_is_one_piece_a_text(loop: EngineLoop, loaded: Loaded) -> None:
    jobs = [job_of(loaded, prompt, max_tokens=9, logprobs=1) for prompt in ("one", "two")]

    async def ask() -> Sequence[Piece]:
        answers = await loop.submit(jobs, at_once=True)
        return [piece async for piece in answers.pieces()]

    pieces = sorted(asyncio.run(ask()))
    assert [piece.text for piece in pieces] == [alone(loaded, job.prompt, max_tokens=9) for job in jobs]
    assert [(piece.num_tokens, piece.finish_reason, len(piece.logprobs)) for piece in pieces] == [(9, END, 9)] * 2
