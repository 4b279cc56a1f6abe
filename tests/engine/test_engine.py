"""The loop: how requests begin, end, are refused, and leave nothing behind."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from hisparse.config import HiSparseConfig
from hisparse.engine import Engine, FinishReason, Request, RequestState, SamplingParams, build_engine
from hisparse.engine.batch import DecodeBatch, PrefillChunk
from hisparse.errors import HiSparseError, ModelOutputError, NeverFitsError
from tests.engine.engines import (
    Checkpoints,
    Record,
    Tiny,
    VerifiedRun,
    assert_clean,
    garbage_engine,
    prompt_of,
)

CONFIG = HiSparseConfig(top_k=32, device_buffer_size=40, prefill_chunk=64)


class Letters:
    """A tokenizer whose every token is one letter."""

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join("abcdefghijklmnopqrstuvwxyz"[token % 26] for token in tokens)


def letters_engine(tiny: Tiny, sizes: tuple[int, ...] = (128, 128), **options: Any) -> Engine:
    loaded = replace(tiny.loaded, tokenizer=cast(Any, Letters()), **options.pop("loaded", {}))
    return garbage_engine(loaded, options.pop("config", CONFIG), sizes, **options)


def run_one(engine: Engine, length: int = 70, **params: Any) -> Request:
    """One greedy request, to its end."""
    request = engine.submit(prompt_of(length), SamplingParams(**({"max_tokens": 24} | params)))
    engine.run()
    assert_clean(engine)
    assert request.state is RequestState.FINISHED
    return request


def unstopped(tiny: Tiny) -> Request:
    return run_one(letters_engine(tiny))


def advance(engine: Engine, request: Request, state: RequestState) -> None:
    """Step until the request is in this state."""
    for _ in range(100):
        if request.state is state:
            return
        engine.step()
    raise AssertionError(f"still {request.state}")


# How a request ends


@pytest.mark.parametrize("max_tokens", [1, 2, 24])
def test_max_tokens(max_tokens: int, tiny: Tiny) -> None:
    request = run_one(letters_engine(tiny), max_tokens=max_tokens)
    assert len(request.output) == len(request.text) == max_tokens
    assert request.finish_reason is FinishReason.LENGTH
    assert request.output == unstopped(tiny).output[:max_tokens]


@pytest.mark.parametrize("place", [0, 5])
@pytest.mark.parametrize("whose", ["the request's", "the model's"])
def test_a_stop_token_ends_the_text_and_is_not_in_it(place: int, whose: str, tiny: Tiny) -> None:
    free = unstopped(tiny)
    stop = free.output[place]
    if whose == "the model's":
        request = run_one(letters_engine(tiny, loaded={"stop_token_ids": (stop,)}))
    else:
        request = run_one(letters_engine(tiny), stop_token_ids=(stop,))
    first = free.output.index(stop)
    assert request.output == free.output[: first + 1]
    assert request.text == free.text[:first]
    assert request.finish_reason is FinishReason.STOP


def test_the_models_stop_tokens_can_be_ignored(tiny: Tiny) -> None:
    free = unstopped(tiny)
    engine = letters_engine(tiny, loaded={"stop_token_ids": (free.output[3],)})
    assert run_one(engine, ignore_eos=True).output == free.output
    stop = free.output[5]
    request = run_one(engine, ignore_eos=True, stop_token_ids=(stop,))
    assert request.output == free.output[: free.output.index(stop) + 1]


@pytest.mark.parametrize("length", [1, 3])
def test_a_stop_string_ends_the_text_and_is_not_in_it(length: int, tiny: Tiny) -> None:
    free = unstopped(tiny)
    stop = free.text[6 : 6 + length]
    request = run_one(letters_engine(tiny), stop=("!", stop))
    first = free.text.index(stop)
    assert request.text == free.text[:first]
    assert request.output == free.output[: first + length]
    assert request.finish_reason is FinishReason.STOP


def test_a_stop_string_that_only_the_end_completes(tiny: Tiny) -> None:
    """With the real byte tokenizer, half a character is text only once the request has ended."""
    halves = [place for place, token in enumerate(unstopped(tiny).output) if 0xC2 <= byte_of(tiny, token) <= 0xF4]
    assert halves, "another prompt is needed: no token of this answer begins a character"
    request = run_one(garbage_engine(tiny.loaded, CONFIG, [128]), max_tokens=halves[0] + 1, stop=("\ufffd",))
    assert request.finish_reason is FinishReason.STOP
    assert "\ufffd" not in request.text


def byte_of(tiny: Tiny, token: int) -> int:
    """The byte that a token of the tiny tokenizer stands for, 0 for a special one."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    characters = {character: byte for byte, character in bytes_to_unicode().items()}
    return int(characters.get(tiny.loaded.tokenizer.convert_ids_to_tokens(token), 0))


@pytest.mark.parametrize(("length", "expected"), [(100, 28), (127, 1)])
def test_the_models_context_cuts_max_tokens(length: int, expected: int, checkpoints: Checkpoints) -> None:
    tiny = checkpoints.get("LlamaForCausalLM", max_positions=128)
    request = run_one(letters_engine(tiny), length, max_tokens=1000)
    assert len(request.output) == request.params.max_tokens == expected
    assert request.finish_reason is FinishReason.LENGTH


def test_requests_end_each_at_its_own_time(tiny: Tiny) -> None:
    engine = letters_engine(tiny, (90, 90, 90))
    requests = [engine.submit(prompt_of(60 + n), SamplingParams(max_tokens=5 * n)) for n in (1, 2, 3)]
    engine.run()
    assert_clean(engine)
    assert [len(request.output) for request in requests] == [5, 10, 15]


def test_greedy_text_does_not_depend_on_company(tiny: Tiny) -> None:
    """Not the logits' last bits (products of other shapes), but on this model every token."""
    engine = letters_engine(tiny, (128, 128, 128))
    request = engine.submit(prompt_of(70), SamplingParams(max_tokens=24))
    for length in (90, 20):
        engine.submit(prompt_of(length), SamplingParams(max_tokens=24))
    engine.run()
    assert request.output == unstopped(tiny).output


def test_seeded_text_reproduces(tiny: Tiny) -> None:
    first, second, other = (
        run_one(letters_engine(tiny), temperature=1.0, top_p=0.9, seed=seed).output for seed in (3, 3, 4)
    )
    assert first == second != other


# The loop


def test_a_step_returns_the_requests_that_got_a_token(tiny: Tiny) -> None:
    engine = letters_engine(tiny)
    long, short = (engine.submit(prompt_of(length), SamplingParams(max_tokens=2)) for length in (100, 20))
    stepped = [engine.step() for _ in range(4)]
    assert stepped == [[], [short, long], [long, short], []]
    assert engine.scheduler.is_idle


def test_run_tells_of_every_step(tiny: Tiny) -> None:
    engine, told = letters_engine(tiny), list[list[Request]]()
    request = engine.submit(prompt_of(100), SamplingParams(max_tokens=3))
    engine.run(told.append)
    assert told == [[], [request], [request], [request]]


def test_observers_see_every_forward_and_every_end(tiny: Tiny) -> None:
    ended: list[int] = []
    record = Record()
    engine = letters_engine(tiny, observers=[record])
    engine.observers.append(Ends(ended))
    requests = [engine.submit(prompt_of(length), SamplingParams(max_tokens=4)) for length in (100, 20)]
    engine.run()
    assert len(record.batches) == 2 + 1 + 3
    assert [len(record.logits[request.id]) for request in requests] == [4, 4]
    assert ended == [request.id for request in requests]
    assert len({request.id for request in requests}) == 2


class Ends:
    """An observer of ends only."""

    def __init__(self, ended: list[int]) -> None:
        self._ended = ended

    def ran(self, batch: object, logits: Tensor | None) -> None:
        pass

    def finished(self, request_id: int) -> None:
        self._ended.append(request_id)


def test_requests_waiting_for_room_are_admitted_in_order(tiny: Tiny) -> None:
    record = Record()
    config = replace(CONFIG, max_running_requests=2)
    engine = letters_engine(tiny, (100,) * 6, config=config, observers=[record])
    requests = [engine.submit(prompt_of(20 + n), SamplingParams(max_tokens=3 + n % 3)) for n in range(6)]
    engine.run()
    assert_clean(engine)
    assert list(record.logits) == [request.id for request in requests]
    assert max(len(batch.request_ids) for batch in record.decodes) == 2
    assert all(request.finish_reason is FinishReason.LENGTH for request in requests)


def test_requests_wait_for_host_pages_too(tiny: Tiny) -> None:
    """Three places, but host pages for one of these at a time."""
    record = Record()
    config = replace(CONFIG, max_running_requests=3, host_to_device_ratio=2.0)  # 3 pages
    engine = letters_engine(tiny, (150, 150, 150), config=config, observers=[record])
    assert engine.runner.cache.layout.num_pages == 4
    requests = [engine.submit(prompt_of(140), SamplingParams(max_tokens=3)) for _ in range(3)]
    engine.run()
    assert_clean(engine)
    assert all(len(batch.request_ids) == 1 for batch in record.decodes)
    assert all(len(request.output) == 3 for request in requests)


# Priorities


def test_texts_are_those_of_each_alone_while_priorities_retract(tiny: Tiny) -> None:
    """Two places, and requests that come later and matter more, whose prompts are read beside the others' answers."""
    run = VerifiedRun(tiny.loaded, replace(CONFIG, max_running_requests=2, host_to_device_ratio=30), [330] * 2)
    requests = [run.submit(length, 40, temperature=0.0, priority=2) for length in (200, 150)]
    for turn, length in enumerate((280, 90, 20, 290, 64, 129)):
        run.step_until(lambda count=6 * turn: len(requests[0].output) + len(requests[1].output) > count)  # type: ignore[misc]
        requests.append(run.submit(length, 12, temperature=0.0, priority=turn % 2))
    run.finish()
    assert run.engine.scheduler.num_retractions >= 4
    batches = run.record.batches
    mixed = [one for one, two in pairwise(batches) if isinstance(one, DecodeBatch) and isinstance(two, PrefillChunk)]
    assert len(mixed) >= 5
    for request in requests:
        alone = garbage_engine(tiny.loaded, CONFIG, [330])
        twin = alone.submit(request.prompt, request.params)
        alone.run()
        assert request.output == twin.output
    assert {len(request.output) for request in requests} == {40, 12}


def test_a_more_important_request_is_served_at_once(tiny: Tiny) -> None:
    engine = letters_engine(tiny, config=replace(CONFIG, max_running_requests=1, host_to_device_ratio=20))
    low = engine.submit(prompt_of(70), SamplingParams(max_tokens=24), priority=1)
    advance(engine, low, RequestState.DECODING)
    high = engine.submit(prompt_of(90), SamplingParams(max_tokens=3))
    engine.step()
    assert (low.state, high.state) == (RequestState.RETRACTED, RequestState.PREFILLING)
    engine.runner.cache.check_integrity()
    advance(engine, high, RequestState.FINISHED)
    engine.run()
    assert low.output == unstopped(tiny).output
    assert_clean(engine)


def test_a_cache_that_others_fill_is_an_error_and_not_a_wait(tiny: Tiny) -> None:
    engine = letters_engine(tiny, (128,))
    cache = engine.runner.cache
    held = cache.admit(64)
    request = engine.submit(prompt_of(70), SamplingParams(max_tokens=3))
    with pytest.raises(HiSparseError, match="1 waiting and 0 retracted requests find no room although nothing runs"):
        engine.run()
    cache.retire(held)
    engine.run()
    assert len(request.output) == 3
    assert_clean(engine)


# What is refused


def test_an_empty_prompt(tiny: Tiny) -> None:
    assert_refused(letters_engine(tiny), [], ValueError, "the prompt is empty: give it at least one token")


@pytest.mark.parametrize(("length", "excess"), [(128, 1), (200, 73)])
def test_a_prompt_that_fills_the_context(length: int, excess: int, checkpoints: Checkpoints) -> None:
    tiny = checkpoints.get("LlamaForCausalLM", max_positions=128)
    message = f"the prompt has {length} tokens, the model's context 128, .* shorten it by at least {excess} tokens"
    assert_refused(letters_engine(tiny), prompt_of(length), ValueError, message)


def test_a_prompt_longer_than_the_engine_was_built_for(tiny: Tiny) -> None:
    message = "a request of 424 positions can never fit: one request can have 128 .host pool 256 rows, 128 positions"
    assert_refused(letters_engine(tiny), prompt_of(400), NeverFitsError, message)


def assert_refused(engine: Engine, prompt: list[int], error: type[Exception], message: str) -> None:
    """At once, while another request runs, and without a trace."""
    running = engine.submit(prompt_of(70), SamplingParams(max_tokens=3))
    engine.step()
    with pytest.raises(error, match=message):
        engine.submit(prompt, SamplingParams(max_tokens=24))
    assert not engine.scheduler.waiting
    assert list(engine._requests) == [running.id]
    engine.run()
    assert len(running.output) == 3
    assert_clean(engine)


def test_a_tokenizer_that_decodes_to_no_text(tiny: Tiny) -> None:
    engine = letters_engine(tiny)
    engine.tokenizer = cast(Any, type("Wrong", (), {"decode": lambda self, tokens, **options: tokens})())
    request = engine.submit(prompt_of(20), SamplingParams(max_tokens=24))
    engine.step()
    with pytest.raises(HiSparseError, match="decoded tokens to list instead of text"):
        assert request.text


# Cancel and retract


@pytest.mark.parametrize("state", RequestState)
def test_cancel_in_every_state(state: RequestState, tiny: Tiny) -> None:
    run = VerifiedRun(replace(tiny.loaded, tokenizer=cast(Any, Letters())), CONFIG, [160, 160])
    others = [run.submit(130), run.submit(40)]
    request = run.submit(100, max_tokens=4)  # two may run: it waits
    if state is not RequestState.WAITING:
        run.engine.cancel(others.pop())
        advance_to(run.engine, request, state)
    output = request.output.copy()
    run.engine.cancel(request)
    assert request.state is RequestState.FINISHED
    run.engine.cancel(request)  # again: nothing happens
    run.finish()
    assert request.output == output
    assert all(len(other.output) == 12 for other in others)
    finished = state is RequestState.FINISHED
    assert request.finish_reason is (FinishReason.LENGTH if finished else FinishReason.CANCELLED)


def advance_to(engine: Engine, request: Request, state: RequestState) -> None:
    if state is RequestState.RETRACTED:
        advance(engine, request, RequestState.DECODING)
        engine.retract(request)
    advance(engine, request, state)


def test_cancel_while_others_wait_for_its_room(tiny: Tiny) -> None:
    engine = letters_engine(tiny, config=replace(CONFIG, max_running_requests=1))
    first, second = (engine.submit(prompt_of(70), SamplingParams(max_tokens=10)) for _ in range(2))
    advance(engine, first, RequestState.DECODING)
    engine.cancel(first)
    engine.step()
    assert second.state is RequestState.PREFILLING
    engine.run()
    assert len(second.output) == 10
    assert_clean(engine)


def test_retracting_changes_no_token(tiny: Tiny) -> None:
    engine = letters_engine(tiny)
    request = engine.submit(prompt_of(70), SamplingParams(max_tokens=24))
    while not engine.scheduler.is_idle:
        engine.step()
        if request.state is RequestState.DECODING:
            engine.retract(request)
    assert request.output == unstopped(tiny).output
    assert_clean(engine)


def test_only_a_decoding_request_can_be_retracted(tiny: Tiny) -> None:
    engine = letters_engine(tiny)
    request = engine.submit(prompt_of(70), SamplingParams(max_tokens=3))
    with pytest.raises(ValueError, match="this one is waiting"):
        engine.retract(request)
    engine.run()
    with pytest.raises(ValueError, match="this one is finished"):
        engine.retract(request)


# NaN


@pytest.mark.parametrize("forward", ["prefill", "decode"])
def test_a_forward_that_fails_ends_its_requests_alone(
    forward: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model may find by itself that it has no output. Trying again would go on for ever."""
    engine = letters_engine(tiny)
    bad = engine.submit(prompt_of(70), SamplingParams(max_tokens=24))
    if forward == "decode":
        advance(engine, bad, RequestState.DECODING)
    good = engine.submit(prompt_of(100), SamplingParams(max_tokens=24))

    def broken(*given: object) -> Tensor:
        raise ModelOutputError("scores are NaN")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, forward, broken)
        with pytest.raises(ModelOutputError, match="scores are NaN"):
            engine.step()
    assert bad.finish_reason is FinishReason.ERROR
    engine.run()
    assert len(good.output) == 24
    assert_clean(engine)


def damage_step(run: VerifiedRun, bad: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    """One decode step in which this request's logits are NaN."""
    choose = run.engine._sampler.choose  # damaged here, so that the verification sees what the model said

    def damaged(logits: Tensor, requests: Sequence[Request]) -> Tensor:
        logits = logits.clone()
        logits[[request.id for request in requests].index(bad.id)] = torch.nan
        return choose(logits, requests)

    position = len(bad.prompt) + len(bad.output)
    with monkeypatch.context() as patch:
        patch.setattr(run.engine._sampler, "choose", damaged)
        with pytest.raises(ModelOutputError, match=f"request {bad.id} at position {position}:"):
            run.engine.step()
    assert bad.finish_reason is FinishReason.ERROR


def after_damage(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> tuple[VerifiedRun, Request, Request]:
    """One of two requests got NaN in the middle of decoding."""
    run = VerifiedRun(tiny.loaded, CONFIG, [128, 128])
    bad, good = run.submit(70, max_tokens=24), run.submit(50, max_tokens=24)
    run.step_until(lambda: len(good.output) == 5)
    damage_step(run, bad, monkeypatch)
    return run, bad, good


def test_nan_logits_name_the_request_and_nothing_is_left(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    run, bad, good = after_damage(tiny, monkeypatch)
    run.engine.runner.cache.check_integrity()
    for request in (bad, good):
        run.engine.cancel(request)
    assert_clean(run.engine)


def test_others_go_on_after_one_got_nan(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _, good = after_damage(tiny, monkeypatch)
    run.finish()
    assert len(good.output) == 24


@pytest.mark.parametrize("budget", [None, 200])
def test_meanwhile_is_called_once_a_step(tiny: Tiny, budget: int | None) -> None:
    """Whatever the step runs: a chunk, several, a decode, or both; and nothing of the step has happened by then."""
    config = HiSparseConfig(top_k=48, max_running_requests=2, prefill_chunk=64, max_num_batched_tokens=budget)
    engine = build_engine(tiny.loaded, config, [200] * 3)
    requests = [engine.submit(prompt_of(length), SamplingParams(max_tokens=5)) for length in (100, 30, 150)]
    seen: list[int] = []

    def produced() -> int:
        return sum(len(request.output) for request in requests)

    while not engine.scheduler.is_idle:
        before, calls = produced(), len(seen)
        engine.step(lambda: seen.append(produced()))
        assert seen[calls:] == [before]
    assert produced() == 15
