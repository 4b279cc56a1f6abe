"""What the outcomes of a load come to: rates and latencies of whole answers, and a count of everything else."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from hisparse.bench.serve_request import Outcome

PERCENTILES = (50, 90, 99)


def summarize(outcomes: Sequence[Outcome], until: float, *, interrupted: bool) -> dict[str, Any]:
    """Figures by name. Rates are of whole answers alone, over the time from the first request to `until`.

    Latencies are in milliseconds and count from the moment a request was due, so that neither a client nor a server
    that falls behind looks better for it: to the first text, from there to the end for each further token, between
    neighbouring chunks with text, and to the end. An answer that came in one piece says nothing of its further tokens.
    A percentile of nothing is None.
    """
    whole = [one for one in outcomes if one.is_complete]
    began = min((one.due_at for one in outcomes), default=until)
    seconds = until - began
    prompt, output = sum(one.prompt_tokens or 0 for one in whole), sum(one.output_tokens for one in whole)
    known = all(one.prompt_tokens is not None for one in whole)
    return {
        "seconds": seconds,
        "interrupted": interrupted,
        **_counts(outcomes, whole),
        "output_counted_by": _counted_by(whole),
        "prompt_tokens": prompt if known else None,
        "output_tokens": output,
        "output_tokens_of_others": sum(one.output_tokens for one in outcomes if not one.is_complete),
        "requests_per_s": _rate(len(whole), seconds),
        "output_tokens_per_s": _rate(output, seconds),
        "total_tokens_per_s": _rate(prompt + output, seconds) if known else None,
        **_latencies(whole),
        "sent_late_ms": spread([_ms(one.began_at - one.due_at) for one in outcomes if one.began_at is not None]),
    }


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and percentiles."""
    names = ("mean", *(f"p{one}" for one in PERCENTILES))
    if not values:
        return dict.fromkeys(names)
    return dict(zip(names, (float(np.mean(values)), *np.percentile(values, PERCENTILES).tolist()), strict=True))


def _counts(outcomes: Sequence[Outcome], whole: Sequence[Outcome]) -> dict[str, Any]:
    failures = [one.failure for one in outcomes if one.failure is not None]
    by_kind = Counter(failure.kind for failure in failures)
    return {
        "sent": len(outcomes),
        "completed": len(whole),
        "completed_short": sum(one.output_tokens < one.asked_tokens for one in whole),
        "completed_long": sum(one.output_tokens > one.asked_tokens for one in whole),
        "completed_in_one_piece": sum(_is_one_piece(one) for one in whole),
        "failed": len(failures),
        "unfinished": sum(one.over_at is None for one in outcomes),
        "failures": dict(by_kind.most_common()),
        "failure_examples": {failure.kind: failure.message for failure in reversed(failures)},  # the first of each
    }


def _latencies(whole: Sequence[Outcome]) -> dict[str, dict[str, float | None]]:
    first, each, between, last = [], [], [], []
    for one in whole:
        end = one.last_at if one.last_at is not None else one.over_at or one.due_at
        start = one.text_at[0] if one.text_at else end  # an answer without any text: all there was to wait for
        first.append(_ms(start - one.due_at))
        last.append(_ms(end - one.due_at))
        between += (np.diff(one.text_at) * 1e3).tolist()
        if one.output_tokens > 1 and not _is_one_piece(one):
            each.append(_ms(end - start) / (one.output_tokens - 1))
    return {"ttft_ms": spread(first), "tpot_ms": spread(each), "itl_ms": spread(between), "latency_ms": spread(last)}


def _is_one_piece(outcome: Outcome) -> bool:
    return outcome.output_tokens > 1 >= len(outcome.text_at)


def _counted_by(whole: Sequence[Outcome]) -> str:
    by_server = sum(one.usage_tokens is not None for one in whole)
    return "usage" if by_server == len(whole) else f"chunks, in {len(whole) - by_server} of {len(whole)} answers"


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def _ms(seconds: float) -> float:
    return seconds * 1e3
