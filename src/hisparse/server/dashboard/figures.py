"""What the dashboard shows that no counter has: tokens of answers under way, and latencies of the last minute."""

import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from hisparse.engine import Engine, FinishReason
from hisparse.server.generation import Generation

WINDOW_S = 60.0
MOST_KEPT = 10_000  # latencies; of a faster server, the last minute is that much shorter
SETTLED_TOKENS = 8  # an answer that is under way counts for the time per token from here on


class Latency(NamedTuple):
    """Of one answer."""

    at: float  # time.monotonic
    seconds: float


class Figures:
    """A watch of the engine loop (engine_loop.py), called on its thread; read on any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: dict[Generation, None] = {}  # answers with a first token
        self._ended_tokens = 0
        self._prompt_tokens = 0
        self._ended: Counter[str] = Counter()
        self._first: deque[Latency] = deque(maxlen=MOST_KEPT)
        self._each: deque[Latency] = deque(maxlen=MOST_KEPT)

    def stepped(self, engine: Engine) -> None:
        """Nothing to do: answers under way are counted when somebody looks."""

    def got_first_token(self, generation: Generation) -> None:
        """Note a text's beginning."""
        if generation.first_token_at is None:
            return
        with self._lock:
            self._under_way[generation] = None
            self._prompt_tokens += len(generation.job.prompt)
            self._first.append(Latency(time.monotonic(), generation.first_token_at - generation.asked_at))

    def ended(self, generation: Generation, reason: FinishReason) -> None:
        """Note a text's end."""
        with self._lock:
            self._under_way.pop(generation, None)
            self._ended[reason.value] += 1
            self._ended_tokens += generation.num_seen
            if (seconds := _seconds_a_token(generation, least_tokens=2)) is not None:
                self._each.append(Latency(time.monotonic(), seconds))

    def read(self) -> dict[str, object]:
        """Totals since the start, and latencies of the last minute in seconds."""
        with self._lock:
            running = [_seconds_a_token(one, SETTLED_TOKENS) for one in self._under_way]
            return {
                "output_tokens": self._ended_tokens + sum(one.num_seen for one in self._under_way),
                "prompt_tokens": self._prompt_tokens,
                "ended": dict(self._ended),
                "ttft": _percentiles(_recent(self._first)),
                "tpot": _percentiles([*_recent(self._each), *(one for one in running if one is not None)]),
            }


def _seconds_a_token(generation: Generation, least_tokens: int) -> float | None:
    """The mean time between its tokens until now; None while there are too few of them."""
    if generation.first_token_at is None or generation.num_seen < least_tokens:
        return None
    return (time.perf_counter() - generation.first_token_at) / (generation.num_seen - 1)


def _recent(latencies: deque[Latency]) -> list[float]:
    """Those of the last minute; older ones are dropped."""
    oldest = time.monotonic() - WINDOW_S
    while latencies and latencies[0].at < oldest:
        latencies.popleft()
    return [one.seconds for one in latencies]


def _percentiles(seconds: Iterable[float]) -> dict[str, float | int] | None:
    values = list(seconds)
    if not values:
        return None
    p50, p90 = np.percentile(values, (50, 90)).tolist()
    return {"p50": p50, "p90": p90, "count": len(values)}
