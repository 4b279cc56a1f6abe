"""Index groups: shared layers hold their records at their anchor's slots, in lockstep."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hisparse.errors import IntegrityError
from hisparse.layout import CacheLayout
from tests.caches import CHURN, EVERY_POLICY, Driver, make_records, new_driver, pad, resident, small_layout, snapshot

pytestmark = pytest.mark.usefixtures("each_backend")

ANCHORS = (0, 1, 1, 1, 4, 4)  # as in GLM-5.2: anchors without followers first, then groups, uneven ones


def grouped_driver(**changes: Any) -> Driver:
    return new_driver(num_layers=6, anchors=ANCHORS, **changes)


@pytest.mark.parametrize("policy", EVERY_POLICY)
@pytest.mark.parametrize("prefetch", [True, False])
def test_shared_layers_follow_through_churn_staging_and_leaving(policy: str, prefetch: bool) -> None:
    driver = grouped_driver(policy=policy, options={"prefetch": prefetch})
    one, other = driver.admit(130, staged=70), driver.admit(staged=12)
    for turn, positions in enumerate(CHURN):
        driver.step({one: [p + 50 for p in positions], other: positions[:2]})  # the driver checks every layer's bytes
        if turn == 2:
            driver.stage(one, 5)
        if turn == 3:
            driver.cache.retract(other)
            driver.cache.resume(other)
        driver.cache.check_integrity()
    for layer in range(6):
        assert resident(driver.cache, one, layer) == resident(driver.cache, one, ANCHORS[layer])
    driver.cache.retire(one)
    driver.cache.check_integrity()
    assert driver.cache.device_pool.tables.slot_of_row.shape[0] == 3


def test_the_layers_of_a_group_are_counted_together_and_each() -> None:
    driver = grouped_driver()
    request = driver.admit(staged=30)
    driver.step({request: [20, 21, 22, 23]})
    cache = driver.cache
    anchor, shared, total = cache.statistics(1), cache.statistics(2), cache.statistics()
    assert anchor.misses == shared.misses == 4
    assert total.misses == 6 * 4
    assert total.fetched_bytes == 6 * 4 * 32
    assert total.order_rebuilds == sum(cache.statistics(layer).order_rebuilds for layer in (0, 1, 4))
    cache.check_integrity()


def test_an_anchor_resolved_twice_hands_its_followers_both_plans() -> None:
    for prefetch in (True, False):
        driver = new_driver(num_layers=3, anchors=(0, 0, 0), max_requests=1, options={"prefetch": prefetch})
        request = driver.admit(staged=20)
        cache = driver.cache
        with cache.step([request]) as step:
            driver.append(step)
            cache.resolve(0, pad([[10, 11]]))
            cache.follow(1)
            slots = cache.resolve(0, pad([[10, 11, 12]]))
            for layer in (1, 2):
                assert cache.follow(layer) is slots
                driver.check(layer, [request], pad([[10, 11, 12]]), slots)
        cache.check_integrity()


def test_shared_layers_that_nobody_followed_are_complete_all_the_same() -> None:
    for prefetch in (True, False):
        driver = new_driver(num_layers=2, anchors=(0, 0), options={"prefetch": prefetch})
        request = driver.admit(staged=20)
        with driver.cache.step([request]) as step:
            driver.append(step)
            driver.cache.resolve(0, pad([[15, 16]]))
        driver.cache.check_integrity()
        driver.step({request: [15, 16, 20]})


def resolve_a_shared_layer(driver: Driver) -> None:
    driver.cache.resolve(2, pad([[0]]))


def follow_an_anchor(driver: Driver) -> None:
    driver.cache.follow(4)


def follow_too_early(driver: Driver) -> None:
    driver.cache.follow(5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (resolve_a_shared_layer, "layer 2 uses the selection of layer 1: follow(2)"),
        (follow_an_anchor, "layer 4 selects for itself: resolve it"),
        (follow_too_early, "layer 4, the anchor, is not resolved in this step yet: resolve it first"),
    ],
)
def test_refusals_inside_a_step(call: Callable[[Driver], None], message: str) -> None:
    driver = grouped_driver()
    request = driver.admit(staged=10)
    with driver.cache.step([request]) as step:
        driver.append(step)
        before = snapshot(driver.cache)
        with pytest.raises(ValueError, match=re.escape(message)):
            call(driver)
        assert snapshot(driver.cache) == before
    driver.cache.check_integrity()


def test_a_shared_layer_is_staged_after_its_anchor() -> None:
    driver = grouped_driver()
    request = driver.admit()
    with pytest.raises(ValueError, match=r"layer 3 uses the slots of layer 1, which has 0 positions .* stage that one"):
        driver.cache.stage(3, request, 0, make_records(1, 3, 0, 5))
    driver.stage(request, 5)
    driver.cache.check_integrity()


@pytest.mark.parametrize(
    ("anchors", "message"),
    [
        ((0,), "anchors must name one for each of 2 layers, got 1"),
        ((1, 1), "layer 0's anchor must be itself or an earlier layer that is its own anchor, got 1"),
        ((0, -1), "layer 1's anchor must be itself"),
        ((0, 1.0), "anchors must be layers, whole numbers, got 1.0"),
    ],
)
def test_anchors_that_cannot_be(anchors: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_layout(anchors=anchors)
    with pytest.raises(ValueError, match=r"layer 2's anchor must be .* its own anchor, got 1"):
        CacheLayout(3, 32, 4, 6, 2, 8, anchors=(0, 0, 1))


def test_a_damaged_record_of_a_shared_layer_is_found() -> None:
    driver = grouped_driver()
    request = driver.admit(staged=10)
    driver.step({request: [0, 1, 2, 3]})
    cache = driver.cache
    slot = int((cache.device_pool.layer(3).row_of_slot >= 0).nonzero()[0])
    cache.device_pool.records[3, slot] += 1
    with pytest.raises(IntegrityError, match="layer 3: a slot's bytes are not its host row's"):
        cache.check_integrity()
    cache.device_pool.records[3, slot] -= 1
    request.staged[3] += 1
    with pytest.raises(IntegrityError, match="a shared layer of a request has positions that its anchor has not"):
        cache.check_integrity()


def test_the_no_io_oracle_moves_no_record() -> None:
    driver = grouped_driver(options={"io": False})
    request = driver.admit(staged=30)
    cache = driver.cache
    before = cache.device_pool.records.clone()
    with cache.step([request]) as step:
        driver.append(step)
        slots = [driver.slots(layer, pad([[20, 21, 22, 23]])) for layer in range(6)]
    new = [int(step.slots[cache.layout.group_of[layer], 0]) for layer in range(6)]
    for layer, slot in enumerate(new):
        before[layer, slot] = cache.device_pool.records[layer, slot]  # write-through is not IO
    assert torch.equal(cache.device_pool.records, before)
    assert all((found >= 0).all() for found in slots)
    assert cache.statistics().misses == 6 * 4
    with pytest.raises(ValueError, match="a no-IO oracle moves no records"):
        cache.check_integrity()
