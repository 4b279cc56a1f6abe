"""The dashboard's figures, from generations made by hand."""

import time
from typing import cast

import pytest

from hisparse.engine import FinishReason, SamplingParams
from hisparse.server.dashboard import figures
from hisparse.server.dashboard.figures import Figures
from hisparse.server.generation import Answers, Generation, Job


def generation(*, first_after: float | None, num_tokens: int, seconds: float = 0.0) -> Generation:
    """`first_after` seconds after it was asked for, its first token came, `seconds` ago."""
    now = time.perf_counter()
    begun = None if first_after is None else now - seconds
    job = Job([1, 2, 3], SamplingParams(max_tokens=100))
    asked = now - seconds - (first_after or 0.0)
    return Generation(0, job, cast(Answers, None), asked_at=asked, first_token_at=begun, num_seen=num_tokens)


def test_tokens_count_before_an_answer_ends() -> None:
    figures = Figures()
    one, other = (generation(first_after=0.1, num_tokens=count) for count in (5, 7))
    for each in (one, other):
        figures.got_first_token(each)
    assert figures.read()["output_tokens"] == 12
    one.num_seen = 9
    figures.ended(one, FinishReason.LENGTH)
    assert figures.read()["output_tokens"] == 16
    assert figures.read()["prompt_tokens"] == 6
    assert figures.read()["ended"] == {"length": 1}


def test_latencies_are_percentiles_of_answers() -> None:
    figures = Figures()
    for tenths in range(1, 12):
        each = generation(first_after=tenths / 10, num_tokens=11, seconds=tenths)
        figures.got_first_token(each)
        figures.ended(each, FinishReason.STOP)
    first, later = figures.read()["ttft"], figures.read()["tpot"]
    assert first == {"p50": pytest.approx(0.6), "p90": pytest.approx(1.0), "count": 11}
    assert later == {"p50": pytest.approx(0.6, rel=0.2), "p90": pytest.approx(1.0, rel=0.2), "count": 11}


def test_a_long_answer_counts_while_it_runs() -> None:
    figures = Figures()
    young, old = (
        generation(first_after=0.1, num_tokens=2, seconds=9),
        generation(first_after=0.1, num_tokens=101, seconds=5),
    )
    figures.got_first_token(young)
    figures.got_first_token(old)
    assert figures.read()["tpot"] == {
        "p50": pytest.approx(0.05, rel=0.2), "p90": pytest.approx(0.05, rel=0.2), "count": 1
    }  # fmt: skip


def test_answers_without_a_token_have_no_latency() -> None:
    figures = Figures()
    figures.ended(generation(first_after=None, num_tokens=0), FinishReason.CANCELLED)
    state = figures.read()
    assert (state["ttft"], state["tpot"], state["ended"]) == (None, None, {"cancelled": 1})


def test_latencies_are_of_the_last_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Figures()
    watch.got_first_token(generation(first_after=0.1, num_tokens=1))
    monkeypatch.setattr(figures, "WINDOW_S", -1.0)
    assert watch.read()["ttft"] is None
