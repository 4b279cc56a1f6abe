"""Logits to tokens: greedy, and distributions against a computation by hand."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hisparse.engine import Request, SamplingParams
from hisparse.engine.sampler import NO_TOKEN, Sampler
from hisparse.engine.text_stream import TextStream

NUM_DRAWS = 4000
LOGITS = torch.tensor([0.0, 2.0, 1.0, -1.0, 1.5, -torch.inf])


def make_request(request_id: int = 0, **params: Any) -> Request:
    return Request(request_id, [1, 2, 3], SamplingParams(**params), TextStream(str))


def sample(sampler: Sampler, logits: Tensor, requests: Sequence[Request]) -> list[int | None]:
    """Tokens; None where there is none to be had."""
    return [None if token == NO_TOKEN else token for token in sampler.choose(logits, requests).tolist()]


def draw(logits: Tensor, count: int = NUM_DRAWS, **params: Any) -> list[int]:
    sampler, request = Sampler(), make_request(**({"seed": 11} | params))
    tokens = [sample(sampler, logits[None], [request])[0] for _ in range(count)]
    return [token for token in tokens if token is not None]


def by_hand(temperature: float, top_k: int, top_p: float) -> dict[int, float]:
    """Probabilities of `LOGITS`: temperature, then the top_k likeliest, then as few of those as reach top_p."""
    weights = {token: math.exp(logit / temperature) for token, logit in enumerate(LOGITS.tolist())}
    kept = sorted(weights, key=lambda token: -weights[token])[: top_k or None]
    total, reached, nucleus = sum(weights[token] for token in kept), 0.0, []
    for token in kept:
        if reached < top_p * total:
            nucleus.append(token)
        reached += weights[token]
    mass = sum(weights[token] for token in nucleus)
    return {token: weights[token] / mass for token in nucleus if weights[token]}


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, 0, 1.0),
        (0.5, 0, 1.0),
        (3.0, 0, 1.0),
        (1.0, 2, 1.0),
        (1.0, 100, 1.0),
        (1.0, 0, 0.5),
        (1.0, 0, 0.85),
        (2.0, 3, 0.7),
        (1.0, 2, 0.6),  # top_p is of what top_k leaves: 0.62 for the first of two
    ],
)
def test_distributions(temperature: float, top_k: int, top_p: float) -> None:
    """Of requests of all seeds, at once."""
    expected = by_hand(temperature, top_k, top_p)
    params = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    requests = [make_request(i, seed=i, **params) for i in range(NUM_DRAWS)]
    drawn = Counter(sample(Sampler(), LOGITS.expand(NUM_DRAWS, -1), requests))
    assert set(drawn) <= set(expected)
    for token, probability in expected.items():
        deviation = math.sqrt(probability * (1 - probability) / NUM_DRAWS)
        assert abs(drawn[token] / NUM_DRAWS - probability) <= 4 * deviation


def test_the_distribution_of_one_stream() -> None:
    drawn = Counter(draw(LOGITS, temperature=1.0, top_p=0.9))
    for token, probability in by_hand(1.0, 0, 0.9).items():
        deviation = math.sqrt(probability * (1 - probability) / NUM_DRAWS)
        assert abs(drawn[token] / NUM_DRAWS - probability) <= 4 * deviation


@pytest.mark.parametrize("changes", [{"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-4}])
def test_what_leaves_only_the_likeliest(changes: dict[str, Any]) -> None:
    assert set(draw(LOGITS, 50, **({"temperature": 1.0} | changes))) == {1}


def test_the_smallest_temperature_leaves_only_the_likeliest() -> None:
    assert set(draw(LOGITS, 50, temperature=1e-310)) == {1}


def test_a_top_k_beyond_every_vocabulary_leaves_all() -> None:
    plain = draw(LOGITS, 200, temperature=1.0)
    for top_k in (5, 6, 10**400):
        assert set(draw(LOGITS, 200, temperature=1.0, top_k=top_k)) == set(plain) == {0, 1, 2, 3, 4}


def test_a_temperature_beyond_float32_makes_all_equal() -> None:
    drawn = Counter(draw(LOGITS, temperature=1e300))
    assert set(drawn) == {0, 1, 2, 3, 4}
    assert min(drawn.values()) > NUM_DRAWS / 5 - 4 * math.sqrt(NUM_DRAWS * 0.16)


def test_a_seed_and_its_negative_are_two() -> None:
    assert draw(LOGITS, 100, temperature=1.0, seed=5) != draw(LOGITS, 100, temperature=1.0, seed=-5)


def test_many_rows_draw_what_each_draws_alone() -> None:
    """More than are drawn from at one time."""
    logits = torch.randn(50, 40, generator=torch.Generator().manual_seed(2)) * 2
    kinds: list[dict[str, Any]] = [{}, {"top_k": 7}, {"top_p": 0.8}]
    requests = [make_request(i, seed=i, temperature=1.0, **kinds[i % 3]) for i in range(50)]
    alone = [sample(Sampler(), logits[i : i + 1], [requests[i]])[0] for i in range(50)]
    assert sample(Sampler(), logits, requests) == alone


@pytest.mark.parametrize("top_k", [0, 30, 900])
@pytest.mark.parametrize("top_p", [0.3, 0.8, 0.999])
def test_the_nucleus_is_exact_beside_any_other_row(top_p: float, top_k: int) -> None:
    """A flat row beside it needs more tokens to be looked at than this one."""
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(4)) * 3
    weights, order = logits.double().softmax(dim=-1).sort(descending=True)
    weights[top_k or 1000 :] = 0
    weights /= weights.sum()
    size = int((weights.cumsum(dim=-1) - weights < top_p).sum())
    requests = [make_request(i, temperature=1.0, top_p=top_p, top_k=top_k, seed=i) for i in range(2)]
    alone, together = Sampler(), Sampler()
    rows = torch.stack([logits, torch.zeros(1000)])
    drawn = [sample(alone, rows[:1], requests[:1])[0] for _ in range(400)]
    assert drawn == [sample(together, rows, requests)[0] for _ in range(400)]
    nucleus = set(order[:size].tolist())
    assert set(drawn) <= nucleus
    certain = {token for token, weight in zip(order.tolist(), weights.tolist(), strict=True) if weight > 0.05}
    assert certain & nucleus <= set(drawn)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", [{}, {"top_k": 5}, {"top_p": 0.9}, {"top_k": 5, "top_p": 0.9}])
def test_a_damaged_row_alone_gets_no_token(kind: dict[str, Any], value: float) -> None:
    assert sample(Sampler(), torch.full((1, 50), value), [make_request(temperature=1.0, **kind)]) == [None]
    if value > -math.inf or math.isnan(value):
        row = torch.zeros(1, 50)
        row[0, 7] = value
        assert sample(Sampler(), row, [make_request(temperature=1.0, **kind)]) == [None]


def test_of_equals_the_first_stay() -> None:
    flat = torch.zeros(40)
    flat[[30, 5]] = 1.0
    assert set(draw(flat, 300, temperature=1.0, top_k=4)) == {5, 30, 0, 1}
    assert set(draw(-flat.clamp(max=0.0), 300, temperature=1.0, top_p=0.05)) == {0, 1}


@pytest.mark.gpu
def test_a_gpu_draws_what_the_cpu_draws_without_being_waited_for() -> None:
    logits = torch.randn(50, 3000, generator=torch.Generator().manual_seed(3)) * 2
    logits[7, 5], logits[9] = torch.nan, -torch.inf
    kinds: list[dict[str, Any]] = [{}, {"top_k": 50}, {"top_p": 0.8}, {"top_k": 10**9, "top_p": 0.5}]
    requests = [make_request(i, seed=i, temperature=float(i % 5), **kinds[i % 4]) for i in range(50)]
    there = logits.cuda()
    Sampler().choose(there, requests)
    torch.cuda.set_sync_debug_mode("error")
    try:
        chosen = Sampler().choose(there, requests)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert chosen.tolist() == Sampler().choose(logits, requests).tolist()


def test_greedy_takes_the_largest() -> None:
    logits = torch.stack([LOGITS, -LOGITS.clamp(min=-5)])
    assert sample(Sampler(), logits, [make_request(0), make_request(1)]) == [1, 5]


def test_greedy_takes_the_first_of_equals() -> None:
    assert sample(Sampler(), torch.zeros(1, 9), [make_request()]) == [0]


def awkward_rows() -> Tensor:
    """Equals, damage at both ends, nothing but -inf, and a single finite one; a view with gaps between its rows."""
    rows = torch.zeros(8, 40)
    rows[1, [7, 3, 39]] = 5.0
    rows[2, 0], rows[3, -1], rows[4, 20] = torch.nan, torch.nan, torch.inf
    rows[5] = -torch.inf
    rows[6] = -torch.inf
    rows[6, 9] = -1e30
    rows[7, 33:] = torch.finfo(torch.float32).max
    return rows[:, :36]


AWKWARD_TOKENS = [0, 3, None, 0, None, None, 9, 33]


def test_greedy_of_awkward_rows() -> None:
    requests = [make_request(request_id) for request_id in range(8)]
    assert sample(Sampler(), awkward_rows(), requests) == AWKWARD_TOKENS
    assert sample(Sampler(), awkward_rows().t().contiguous().t(), requests) == AWKWARD_TOKENS


@pytest.mark.gpu
def test_greedy_of_awkward_rows_on_a_gpu() -> None:
    requests = [make_request(request_id) for request_id in range(8)]
    assert sample(Sampler(), awkward_rows().cuda(), requests) == AWKWARD_TOKENS


def test_greedy_and_sampled_requests_share_a_batch() -> None:
    sampler = Sampler()
    requests = [make_request(0), make_request(1, temperature=1.0, top_k=2, seed=1)]
    drawn = [sample(sampler, LOGITS.repeat(2, 1), requests) for _ in range(50)]
    assert {greedy for greedy, _ in drawn} == {1}
    assert {sampled for _, sampled in drawn} == {1, 4}


def test_sampling_leaves_the_logits_alone() -> None:
    logits = LOGITS.repeat(2, 1)
    sample(Sampler(), logits, [make_request(0, temperature=0.3, top_k=2, top_p=0.4), make_request(1)])
    assert torch.equal(logits, LOGITS.repeat(2, 1))


def test_a_seed_reproduces() -> None:
    assert draw(LOGITS, 100, temperature=1.0, seed=5) == draw(LOGITS, 100, temperature=1.0, seed=5)
    assert draw(LOGITS, 100, temperature=1.0, seed=5) != draw(LOGITS, 100, temperature=1.0, seed=6)


def test_no_seed_differs_from_run_to_run() -> None:
    assert draw(LOGITS, 100, temperature=1.0, seed=None) != draw(LOGITS, 100, temperature=1.0, seed=None)


def test_a_seed_does_not_touch_the_global_stream() -> None:
    before = torch.get_rng_state()
    draw(LOGITS, 5, temperature=1.0)
    draw(LOGITS, 5, temperature=1.0, seed=None)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_seed_does_not_depend_on_the_batch() -> None:
    alone = draw(LOGITS, 60, temperature=1.0, seed=5)
    sampler, request = Sampler(), make_request(7, temperature=1.0, seed=5)
    others = [make_request(8, temperature=1.0, seed=5), make_request(9, temperature=2.0), make_request(10)]
    crowded = []
    for step in range(60):
        batch = others[: step % 4]
        batch.insert(step % (len(batch) + 1), request)
        crowded.append(sample(sampler, LOGITS.repeat(len(batch), 1), batch)[batch.index(request)])
    assert crowded == alone


def test_a_batch_of_all_kinds_draws_what_each_draws_alone() -> None:
    logits = torch.randn(9, 50, generator=torch.Generator().manual_seed(1)) * 3
    logits[4, 7] = torch.nan
    kinds: list[dict[str, Any]] = [{"temperature": 1.0}, {}, {"temperature": 0.5, "top_k": 5, "top_p": 0.9}]
    requests = [make_request(i, seed=i, **kinds[i % 3]) for i in range(9)]
    together, alone = Sampler(), Sampler()
    for _ in range(20):
        tokens = sample(together, logits, requests)
        assert tokens == [sample(alone, logits[i : i + 1], [requests[i]])[0] for i in range(9)]
        assert tokens[4] is None


def test_a_forgotten_stream_starts_again() -> None:
    sampler, request = Sampler(), make_request(temperature=1.0, seed=5)
    first = [sample(sampler, LOGITS[None], [request])[0] for _ in range(40)]
    sampler.forget(request)
    assert [sample(sampler, LOGITS[None], [request])[0] for _ in range(40)] == first
    sampler.forget(make_request(99))  # one that never drew anything


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("damage", [torch.nan, torch.inf])
def test_a_damaged_row_gets_no_token_and_the_others_do(damage: float, temperature: float) -> None:
    logits = LOGITS.repeat(3, 1)
    logits[1, 3] = damage
    requests = [make_request(request_id, temperature=temperature) for request_id in (40, 41, 42)]
    tokens = sample(Sampler(), logits, requests)
    assert [token is None for token in tokens] == [False, True, False]


def test_a_row_of_nothing_gets_no_token() -> None:
    logits = torch.stack([LOGITS, torch.full_like(LOGITS, -torch.inf)])
    assert sample(Sampler(), logits, [make_request(3), make_request(4)]) == [1, None]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -0.1}, "temperature must be 0 .* got -0.1"),
        ({"temperature": math.nan}, "temperature .* got nan"),
        ({"temperature": math.inf}, "temperature .* got inf"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"top_p": 1.1}, "top_p .* got 1.1"),
        ({"top_p": math.nan}, "top_p .* got nan"),
        ({"top_k": -1}, "top_k must be 0 .* got -1"),
        ({"top_k": 1.5}, "top_k must be a whole number, got 1.5"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"stop": ("end", "")}, "a stop string must not be empty"),
    ],
)
def test_sampling_parameters_out_of_range(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**changes)
