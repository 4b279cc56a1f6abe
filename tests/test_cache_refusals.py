"""Refusals: the message names the value and the way out, and nothing has changed."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from hisparse.admission import CacheRequest
from hisparse.cache import HierarchicalCache
from hisparse.errors import CapacityError
from hisparse.layout import PAGE_RECORDS
from tests.caches import (
    Driver,
    make_records,
    new_driver,
    pad,
    small_cache,
    small_layout,
    small_state,
    snapshot,
)

pytestmark = pytest.mark.usefixtures("each_backend")

Call = Callable[[HierarchicalCache, CacheRequest], object]
REFUSALS: dict[str, tuple[Call, str]] = {
    "admit nothing": (lambda c, r: c.admit(0), "max_positions must be at least 1, got 0"),
    "admit too long": (lambda c, r: c.admit(513), "513 positions can never fit: one request can have 512.*Shorten it"),
    "admit for now": (lambda c, r: c.admit(385), "7 host pages are needed and 6 are free; wait for some"),
    "can_admit nothing": (lambda c, r: c.can_admit(-3), "max_positions must be at least 1, got -3"),
    "prefix not whole": (lambda c, r: c.admit(128, prefix=(r, 63)), "whole pages of 64.* 66 positions, got 63"),
    "prefix empty": (lambda c, r: c.admit(128, prefix=(r, 0)), "whole pages of 64.* 66 positions, got 0"),
    "prefix too long": (lambda c, r: c.admit(256, prefix=(r, 128)), "donor's 66 positions, got 128"),
    "prefix is all": (lambda c, r: c.admit(64, prefix=(r, 64)), "must exceed the shared prefix of 64, got 64"),
    "stage layer": (lambda c, r: c.stage(2, r, 66, make_records(1, 0, 0, 1)), "layer must be 0 to 1, got 2"),
    "stage layer -1": (lambda c, r: c.stage(-1, r, 66, make_records(1, 0, 0, 1)), "layer must be 0 to 1, got -1"),
    "stage gap": (lambda c, r: c.stage(0, r, 67, make_records(1, 0, 0, 1)), "layer 0 has 66 .* must be that, got 67"),
    "stage again": (lambda c, r: c.stage(1, r, 0, make_records(1, 0, 0, 1)), "layer 1 has 66 .* must be that, got 0"),
    "stage past capacity": (
        lambda c, r: c.stage(0, r, 66, make_records(1, 0, 0, 9)),
        "positions 66 to 74 are past the 70 that the request was admitted with",
    ),
    "record size": (
        lambda c, r: c.stage(0, r, 66, torch.zeros(1, 9)),
        r"a record has 32 bytes in this cache, got 36 from torch.float32 \[1, 9\]",
    ),
    "history too long": (lambda c, r: c.history(0, r, 67), "end must be 0 to 66, the positions staged, got 67"),
    "history negative": (lambda c, r: c.history(0, r, -1), "end must be 0 to 66, the positions staged, got -1"),
    "history layer": (lambda c, r: c.history(9, r, 1), "layer must be 0 to 1, got 9"),
    "resume an active one": (lambda c, r: c.resume(r), "needs a request that is retracted, got one that is active"),
    "a stranger": (lambda c, r: c.retire(small_cache().admit(64)), "not in the cache"),
    "append outside a step": (lambda c, r: c.append(0, make_records(1, 0, 0, 1)), r"inside `with cache.step\("),
    "resolve outside a step": (lambda c, r: c.resolve(0, pad([[0]])), r"inside `with cache.step\("),
    "an empty step": (lambda c, r: enter_step(c, []), "a step needs at least one request"),
    "tokens for others": (lambda c, r: c.step([r], tokens=[1, 2]).__enter__(), "one a request, got 2 with 1 requests"),
    "tokens in parts": (lambda c, r: c.step([r], tokens=cast(Any, [1.5])).__enter__(), "tokens must be whole numbers"),
    "tokens too large": (lambda c, r: c.step([r], tokens=[2**70]).__enter__(), "tokens must be whole numbers"),
    "a batch too small": (lambda c, r: enter_step(c, [r], batch_size=0), "batch size 0 has no room for 1 requests"),
    "a batch too large": (
        lambda c, r: enter_step(c, [r], batch_size=99),
        "at most max_requests = [0-9]+ lines, got 99",
    ),
    "recorded without a capture": (
        lambda c, r: record(c, 1),
        r"inside `with torch.cuda.graph\(...\)`, with the cache on",
    ),
    "recorded too large": (lambda c, r: record(c, 3), "batch_size must be 1 to max_requests = 2, got 3"),
    "a request twice": (lambda c, r: enter_step(c, [r, r]), "only once"),
}


def enter_step(cache: HierarchicalCache, requests: list[CacheRequest], batch_size: int | None = None) -> None:
    with cache.step(requests, batch_size=batch_size):
        raise AssertionError("the step began")


def record(cache: HierarchicalCache, batch_size: int) -> None:
    with cache.record_step(batch_size):
        raise AssertionError("the step began")


def cache_with_a_request() -> tuple[Driver, CacheRequest]:
    driver = new_driver(with_state=True)
    request = driver.admit(70, staged=65)
    driver.step({request: [0, 64, 65]})
    return driver, request


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal_names_the_value_and_changes_nothing(name: str) -> None:
    driver, request = cache_with_a_request()
    call, message = REFUSALS[name]
    before = snapshot(driver.cache)
    with pytest.raises((ValueError, CapacityError), match=message):
        call(driver.cache, request)
    assert snapshot(driver.cache) == before
    driver.step({request: [1, 66]})
    driver.cache.check_integrity()


IN_STEP_REFUSALS: dict[str, tuple[Call, str]] = {
    "append layer": (lambda c, r: c.append(2, make_records(1, 0, 0, 1)), "layer must be 0 to 1, got 2"),
    "append too many": (lambda c, r: c.append(0, make_records(1, 0, 0, 2)), "append takes 1 records.* got 2"),
    "append size": (lambda c, r: c.append(0, torch.zeros(1, 1)), r"has 32 bytes in this cache, got 4 from"),
    "resolve layer": (lambda c, r: c.resolve(-1, pad([[0]])), "layer must be 0 to 1, got -1"),
    "selection dtype": (lambda c, r: c.resolve(0, pad([[0]]).long()), r"must be int32, got torch.int64: .*\.int\(\)"),
    "selection lines": (lambda c, r: c.resolve(0, pad([[0], [0]])), r"shape \[1, k\].*got \[2, 1\]"),
    "selection dimensions": (lambda c, r: c.resolve(0, pad([[0]])[0]), r"shape \[1, k\].*got \[1\]"),
    "selection width": (
        lambda c, r: c.resolve(0, pad([[0, 1, 2, 3, 4]])),
        "at most top_k = 4 positions a request, got 5: build the cache with a larger top_k and device_buffer_size",
    ),
    "selection device": (
        lambda c, r: c.resolve(0, torch.empty(1, 1, dtype=torch.int32, device="meta")),
        "selection must be on (cpu|cuda:0), where the slots are, got meta",
    ),
    "position twice": (lambda c, r: c.resolve(0, pad([[1, 1]])), r"selection\[0\] names position 1 twice"),
    "position too late": (lambda c, r: c.resolve(0, pad([[67]])), "is 67, but that request's history has 67"),
    "retire": (lambda c, r: c.retire(r), "retire cannot be called inside a step: leave the `with"),
    "retract": (lambda c, r: c.retract(r), "retract cannot be called inside a step"),
    "resume": (lambda c, r: c.resume(r), "resume cannot be called inside a step"),
    "stage": (lambda c, r: c.stage(0, r, 66, make_records(1, 0, 66, 1)), "stage cannot be called inside a step"),
    "step": (lambda c, r: enter_step(c, [r]), "step cannot be called inside a step"),
}


@pytest.mark.parametrize("name", IN_STEP_REFUSALS)
def test_refusal_inside_a_step_changes_nothing_and_the_step_can_go_on(name: str) -> None:
    driver, request = cache_with_a_request()
    call, message = IN_STEP_REFUSALS[name]
    with driver.cache.step([request]) as step:
        driver.append(step)
        before = snapshot(driver.cache)
        with pytest.raises(ValueError, match=message):
            call(driver.cache, request)
        assert snapshot(driver.cache) == before
        driver.check(0, [request], pad([[66, 3]]), driver.cache.resolve(0, pad([[66, 3]])))
    assert request.length == 67
    driver.cache.check_integrity()


def test_requests_that_left_are_refused_everywhere() -> None:
    driver, request = cache_with_a_request()
    cache = driver.cache
    records = make_records(1, 0, 66, 1)
    cache.retract(request)
    refusal = "needs a request that is active, got one that is retracted"
    with pytest.raises(ValueError, match=refusal):
        cache.retract(request)
    with pytest.raises(ValueError, match=refusal):
        enter_step(cache, [request])
    with pytest.raises(ValueError, match="needs a request that is active"):
        cache.stage(0, request, 66, records)
    with pytest.raises(ValueError, match="needs a request that is active, got one that is retracted"):
        cache.admit(128, prefix=(request, 64))
    cache.retire(request)
    for leave in (cache.retire, cache.retract, cache.resume):
        with pytest.raises(ValueError, match=r"not in the cache \(it is retired\)"):
            leave(request)
    cache.check_integrity()
    assert cache.host_pool.pages.num_free == 8


def test_steps_of_requests_that_cannot_go_on() -> None:
    driver = new_driver()
    full = driver.admit(4, staged=4)
    uneven = driver.admit(4)
    driver.cache.stage(0, uneven, 0, make_records(1, 0, 0, 2))
    before = snapshot(driver.cache)
    with pytest.raises(ValueError, match="has used all 4 positions that it was admitted with"):
        enter_step(driver.cache, [full])
    with pytest.raises(ValueError, match=r"staged unevenly, \[2, 0\]: finish its chunk first"):
        enter_step(driver.cache, [uneven])
    assert snapshot(driver.cache) == before
    driver.cache.check_integrity()


def test_all_reservations_taken() -> None:
    cache = small_cache()
    cache.admit(1)
    cache.admit(1)
    before = snapshot(cache)
    assert not cache.can_admit(1)
    with pytest.raises(CapacityError, match="all 2 reservations of the device pool are taken; wait for one"):
        cache.admit(1)
    assert snapshot(cache) == before
    cache.check_integrity()


def test_policy_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match=r"policy must be one of fifo, lru, random.* got 'mru'"):
        HierarchicalCache(small_layout(), policy="mru")


def test_prefix_of_another_cache_is_refused() -> None:
    stranger = Driver(small_cache()).admit(128, staged=64)
    cache = small_cache()
    with pytest.raises(ValueError, match="not in the cache"):
        cache.admit(128, prefix=(stranger, 64))
    cache.check_integrity()


def test_device_named_with_its_index_serves_selections() -> None:
    cache = HierarchicalCache(small_layout(), device="cpu:0")
    request = cache.admit(64)
    with cache.step([request]):
        for layer in range(2):
            cache.append(layer, make_records(1, layer, 0, 1).cpu())
            cache.resolve(layer, pad([[0]]).to("cpu:0"))
    cache.check_integrity()


@pytest.mark.parametrize("changes", [{"max_requests": 1}, {"max_pages": 1}], ids=str)
def test_selection_state_of_another_shape_is_refused(changes: dict[str, int]) -> None:
    layout = small_layout()
    with pytest.raises(ValueError, match="selection state must have"):
        HierarchicalCache(layout, selection_state=small_state(layout, **changes))


def test_page_size_is_what_the_tests_assume() -> None:
    assert PAGE_RECORDS == 64


def test_resolve_before_append_is_refused() -> None:
    driver = new_driver()
    request = driver.admit(staged=10)
    with driver.cache.step([request]) as step:
        with pytest.raises(ValueError, match="layer 1 is resolved before `append`"):
            driver.cache.resolve(1, torch.tensor([[10]], dtype=torch.int32))
        driver.append(step)
    driver.cache.check_integrity()
