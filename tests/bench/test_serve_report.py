"""Figures of a load, from outcomes made by hand: whole answers alone are averaged, all others are counted."""

import pytest

from hisparse.bench.serve_report import spread, summarize
from hisparse.bench.serve_request import Failure, Outcome
from hisparse.bench.serve_table import table


def whole(due: float, text_at: list[float], tokens: int | None, *, prompt: int | None = 10, asked: int = 4) -> Outcome:
    outcome = Outcome(due, asked, began_at=due + 0.001, text_at=text_at, last_at=text_at[-1], over_at=text_at[-1] + 1)
    outcome.prompt_tokens, outcome.usage_tokens = prompt, tokens
    return outcome


def failed(due: float, kind: str, message: str = "why") -> Outcome:
    return Outcome(due, 4, began_at=due, text_at=[due + 1], over_at=due + 2, failure=Failure(kind, message))


OUTCOMES = [
    whole(100.0, [100.5, 100.7, 101.1], 4),
    whole(101.0, [101.1, 101.2, 101.3, 101.4], 3),
    failed(102.0, "HTTP 429", "the first"),
    failed(103.0, "HTTP 429", "the second"),
    failed(104.0, "timeout"),
    Outcome(105.0, 4, began_at=105.0, text_at=[105.5]),
]


def test_rates_and_latencies_are_of_whole_answers() -> None:
    result = summarize(OUTCOMES, 110.0, interrupted=True)
    assert result["seconds"] == 10.0
    assert (result["requests_per_s"], result["output_tokens_per_s"], result["total_tokens_per_s"]) == (0.2, 0.7, 2.7)
    assert result["ttft_ms"]["mean"] == pytest.approx((500 + 100) / 2)
    assert result["tpot_ms"]["mean"] == pytest.approx((600 / 3 + 300 / 2) / 2)
    assert result["itl_ms"]["mean"] == pytest.approx((200 + 400 + 100 + 100 + 100) / 5)
    assert result["latency_ms"]["mean"] == pytest.approx((1100 + 400) / 2)


def test_everything_else_is_counted() -> None:
    result = summarize(OUTCOMES, 110.0, interrupted=True)
    assert result["sent"] == 6 == result["completed"] + result["failed"] + result["unfinished"]
    assert (result["completed"], result["completed_short"], result["failed"], result["unfinished"]) == (2, 1, 3, 1)
    assert result["failures"] == {"HTTP 429": 2, "timeout": 1}
    assert result["failure_examples"] == {"HTTP 429": "the first", "timeout": "why"}
    assert result["output_tokens_of_others"] == 4
    assert result["interrupted"] is True


def test_a_server_that_counts_nothing() -> None:
    result = summarize([whole(0.0, [1.0, 2.0], None, prompt=None, asked=2)], 4.0, interrupted=False)
    assert (result["output_tokens"], result["output_tokens_per_s"]) == (2, 0.5)
    assert (result["prompt_tokens"], result["total_tokens_per_s"]) == (None, None)
    assert result["output_counted_by"] == "chunks, in 1 of 1 answers"


def test_answers_without_text_or_of_one_token() -> None:
    silent = Outcome(0.0, 1, began_at=0.0, last_at=2.0, over_at=2.0, prompt_tokens=1, usage_tokens=1)
    result = summarize([silent], 2.0, interrupted=False)
    assert result["ttft_ms"]["mean"] == result["latency_ms"]["mean"] == 2000
    assert result["tpot_ms"]["mean"] is None


def test_nothing_at_all() -> None:
    result = summarize([], 5.0, interrupted=True)
    assert (result["sent"], result["requests_per_s"]) == (0, 0.0)
    assert set(result["ttft_ms"].values()) == {None}


def test_percentiles() -> None:
    values = spread([float(value) for value in range(101)])
    assert values == {"mean": 50.0, "p50": 50.0, "p90": 90.0, "p99": 99.0}


def test_the_table_shows_all_of_it() -> None:
    about = {
        "model": "m", "base_url": "http://h/v1", "api": "completions", "load": "closed loop, 2 at once",
        "prompts": "random token ids", "input_tokens": 10, "asked_output_tokens": 4, "client_busy": 0.9,
    }  # fmt: skip
    text = table(about | summarize(OUTCOMES, 110.0, interrupted=True))
    for words in (
        "m at http://h/v1",
        "random token ids, 10 tokens (10 by the server's count)",
        "6 sent in 10.0 s: 2 completed, 1 of them shorter than asked",
        "3 failed, 1 unfinished (interrupted)",
        "0.20 requests/s, 0.7 output tokens/s, 2.7 with prompts",
        "2  HTTP 429: the first",
        "1  timeout: why",
        "4 output tokens of requests that did not complete, not counted",
        "this client was busy 90% of the time",
    ):
        assert words in text
    nothing = table(about | summarize([], 5.0, interrupted=True))
    assert "0 sent" in nothing
