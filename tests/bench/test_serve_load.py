"""When requests come: never more at once than asked, all of them, and Poisson moments from their seed."""

import asyncio
import time
from itertools import pairwise
from typing import Any

import pytest

from hisparse.bench.serve_load import Load


def test_a_closed_loop_keeps_its_number() -> None:
    running, most, numbers = 0, 0, []

    async def send(number: int, due_at: float) -> None:
        nonlocal running, most
        numbers.append(number)
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001 * (number % 3))
        running -= 1

    asyncio.run(Load(concurrency=4, requests=21).run(int, send))
    assert numbers == list(range(21))
    assert most == 4


def due_moments(seed: int) -> list[float]:
    due: list[float] = []

    async def send(number: int, due_at: float) -> None:
        due.append(due_at)

    asyncio.run(Load(rate=2000, requests=200, seed=seed).run(int, send))
    return [one - due[0] for one in due]


def test_poisson_moments_come_from_the_seed() -> None:
    first, again, other = due_moments(1), due_moments(1), due_moments(2)
    assert first == pytest.approx(again, abs=1e-6)
    assert first != pytest.approx(other, abs=1e-6)
    gaps = [later - earlier for earlier, later in pairwise(first)]
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 2000, rel=0.25)


def test_poisson_does_not_wait_for_answers() -> None:
    begun = 0
    all_begun = asyncio.Event()

    async def send(number: int, due_at: float) -> None:
        nonlocal begun
        begun += 1
        if begun == 30:
            all_begun.set()
        await all_begun.wait()

    asyncio.run(asyncio.wait_for(Load(rate=5000, requests=30).run(int, send), 60))
    assert begun == 30


@pytest.mark.parametrize("how", [{"concurrency": 2}, {"rate": 1000.0}])
def test_a_duration_ends_it(how: dict[str, Any]) -> None:
    sent: list[float] = []

    async def send(number: int, due_at: float) -> None:
        sent.append(time.perf_counter())
        await asyncio.sleep(0.002)

    start = time.perf_counter()
    asyncio.run(Load(**how, duration_s=0.1).run(int, send))
    assert sent
    assert min(sent) >= start


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"requests": 1}, "either a concurrency"),
        ({"concurrency": 1, "rate": 1.0, "requests": 1}, "either a concurrency"),
        ({"concurrency": 0, "requests": 1}, "--concurrency must be at least 1, got 0"),
        ({"rate": 0.0, "requests": 1}, "--request-rate must be above 0"),
        ({"rate": float("nan"), "requests": 1}, "--request-rate must be above 0"),
        ({"concurrency": 1, "requests": 0}, "--requests must be at least 1"),
        ({"concurrency": 1, "duration_s": -1.0}, "--duration must be above 0"),
        ({"concurrency": 1}, "a load has an end"),
    ],
)
def test_impossible_loads(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Load(**values)
