"""The rules of docs/architecture.md, one by one, and the orders that follow from them."""

import re

import pytest
import torch
from torch import Tensor

from hisparse.admission import CacheRequest
from hisparse.device_pool import STEP_LIMIT, fetched, hit
from hisparse.errors import HiSparseError
from tests.caches import (
    CHURN,
    EVERY_POLICY,
    Driver,
    host_records,
    new_driver,
    pad,
    resident,
    row_of,
    small_cache,
    snapshot,
)

pytestmark = pytest.mark.usefixtures("each_backend")


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([3, 1, 3], "selection[0] names position 3 twice"),
        ([0, 11], "selection[0, 1] is 11, but that request's history has 11 positions"),
        ([0, -2], "selection[0, 1] is -2, but that request's history has 11 positions"),
    ],
)
def test_rule_1_debug_mode_checks_that_positions_are_distinct_and_exist(positions: list[int], message: str) -> None:
    driver = new_driver()
    request = driver.admit(staged=10)
    with pytest.raises(ValueError, match=re.escape(message)):
        driver.step({request: positions})
    assert request.length == 10
    driver.step({request: [10, 3]})
    driver.cache.check_integrity()


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_rule_2_slots_hold_what_they_were_handed_out_for_and_victims_are_forgotten(policy: str) -> None:
    driver = new_driver(policy=policy)
    one, other = driver.admit(staged=20), driver.admit(staged=20)
    for positions in CHURN:
        slots = driver.step({one: positions, other: positions[::-1]})  # Driver checks the bytes
        for layer in range(2):
            tables = driver.cache.device_pool.layer(layer)
            used = slots[layer].flatten().long()
            assert used.unique().numel() == used.numel()
            assert torch.equal(tables.slot_of_row[tables.row_of_slot[used].long()], used.int())
        driver.cache.check_integrity()


def test_rule_2_a_victim_is_never_in_use_even_when_half_the_pool_is_claimed_at_once() -> None:
    driver = new_driver(max_requests=1, device_buffer_size=5)  # k + 1 slots: every step uses them all
    request = driver.admit(staged=30)
    for start in (0, 4, 8, 2, 12):
        driver.step({request: [start, start + 1, start + 2, start + 3]})
        newest = request.length - 1
        assert resident(driver.cache, request) == [start, start + 1, start + 2, start + 3, newest]
    driver.cache.check_integrity()


def test_rule_2_a_hit_is_not_evicted_when_a_layer_is_resolved_twice_in_a_step() -> None:
    driver = new_driver(num_layers=1, max_requests=1)
    request = driver.admit(staged=20)
    cache = driver.cache
    with cache.step([request]) as step:
        driver.append(step)
        first = cache.resolve(0, pad([[10, 11, 12]]))  # more than half the list is used up: it is made again
        second = cache.resolve(0, pad([[4, 19]]))  # 4 is resident; with 19 the step uses all 6 slots
        driver.check(0, [request], pad([[10, 11, 12]]), first)
        driver.check(0, [request], pad([[4, 19]]), second)
    cache.check_integrity()


def test_rule_3_a_shared_row_that_two_requests_miss_is_fetched_once() -> None:
    driver = new_driver()
    donor = driver.admit(130, staged=64)
    other = driver.admit(130, prefix=(donor, 64))
    driver.step({donor: [0, 1, 2, 3], other: [4, 5, 6, 7]})  # 2 new records and 8 others fill 10 of 12 slots
    before = driver.cache.statistics()
    selection = [20, 30, 40]
    slots = driver.step({donor: selection, other: selection})
    for layer in range(2):
        assert torch.equal(slots[layer][0], slots[layer][1])
    after = driver.cache.statistics()
    assert after.misses - before.misses == 2 * len(selection)
    assert after.hits == before.hits
    assert after.fetched_bytes == after.misses * 32
    driver.cache.check_integrity()


def test_rule_4_free_slots_go_before_victims() -> None:
    driver = new_driver(max_requests=1, num_slots=10)
    request = driver.admit(staged=4)
    driver.step({request: [0, 1, 2, 3]})
    driver.step({request: []})
    assert resident(driver.cache, request) == [0, 1, 2, 3, 4, 5]
    for length in range(7, 11):
        driver.step({request: [0]})
        assert resident(driver.cache, request) == list(range(length))
    driver.step({request: [0]})
    assert resident(driver.cache, request) == [0, 1, 2, 3, 5, 6, 7, 8, 9, 10]  # 4 was never selected: it leaves
    driver.cache.check_integrity()


@pytest.mark.parametrize("leave", ["retire", "retract"])
def test_rule_4_leaving_returns_the_slots(leave: str) -> None:
    driver = new_driver()
    leaving, staying = driver.admit(staged=6), driver.admit(staged=6)
    tables = driver.cache.device_pool.tables
    assert tables.num_free.tolist() == [0, 0]
    getattr(driver.cache, leave)(leaving)
    assert tables.num_free.tolist() == [6, 6]
    driver.step({staying: [0, 1, 2, 3]})
    assert resident(driver.cache, staying) == [0, 1, 2, 3, 4, 5, 6]
    driver.cache.check_integrity()


def test_rule_5_rows_of_a_retired_request_are_clear_before_the_next_owner_gets_them() -> None:
    driver = new_driver(num_pages=1, max_requests=1)
    for _ in range(3):
        request = driver.admit(staged=10)
        assert request.pages == [0]
        driver.step({request: [0, 5, 9, 10]})
        driver.cache.retire(request)
        assert (driver.cache.device_pool.tables.slot_of_row == -1).all()
        driver.cache.check_integrity()


@pytest.mark.parametrize("order", ["donor first", "sharer first"])
def test_rule_5_rows_shared_by_retracted_requests_are_clear_before_the_next_owner_gets_them(order: str) -> None:
    driver = new_driver(max_requests=2, num_pages=3)
    donor = driver.admit(65, staged=64)
    sharer = driver.admit(65, prefix=(donor, 64))
    first, last = (donor, sharer) if order == "donor first" else (sharer, donor)
    driver.cache.retract(last)
    driver.cache.retire(first)
    driver.cache.retire(last)
    assert (driver.cache.device_pool.tables.slot_of_row == -1).all()
    request = driver.admit(192, staged=150)
    driver.step({request: [0, 1, 64, 128]})
    driver.cache.check_integrity()


def test_rule_6_a_new_record_is_stamped_as_used_and_its_host_copy_does_not_read_the_slot() -> None:
    driver = new_driver(max_requests=1)
    request = driver.admit(staged=20)
    cache = driver.cache
    with cache.step([request]) as step:
        for layer in range(2):
            tables = cache.device_pool.layer(layer)
            assert tables.stamp[step.slots[layer]].tolist() == [fetched(cache.backend.step_number)]
            assert torch.equal(tables.row_of_slot[step.slots[layer]].long(), step.rows)
        driver.append(step)
        cache.resolve(0, pad([[]]))  # the record is in its slot now
        cache.device_pool.records[0, step.slots[0]] = 0  # lost from the slot at once
    on_host = host_records(cache)[0, step.rows.cpu()].to(cache.device)
    cache.device_pool.records[0, step.slots[0]] = on_host
    assert torch.equal(on_host[0].view(torch.int32), driver.record(request, 0, 20))
    for start in (0, 4, 8):  # push it out ...
        driver.step({request: [start, start + 1, start + 2, start + 3]})
    assert 20 not in resident(cache, request)
    driver.step({request: [20]})  # ... and fetch it again
    cache.check_integrity()


@pytest.mark.reference_only("the GPU makes recency lists again more often")
def test_rule_7_a_recency_list_is_made_again_only_when_half_used_up() -> None:
    driver = new_driver(num_layers=1, max_requests=1, top_k=2, device_buffer_size=8)
    request = driver.admit(staged=30)
    made, lists = [], []
    for i in range(8):
        driver.step({request: [2 * i, 2 * i + 1]})
        made.append(driver.cache.statistics().order_rebuilds)
        lists.append(driver.cache.device_pool.layer(0).order.tolist())
    assert made[-1] < len(made)
    for i in range(1, len(made)):
        assert made[i] > made[i - 1] or lists[i] == lists[i - 1]  # between rebuilds nobody writes it
    driver.cache.check_integrity()


@pytest.mark.parametrize("policy", ["fifo", "random"])
def test_rule_7_other_orders_are_made_again_at_every_resolve(policy: str) -> None:
    driver = new_driver(policy=policy)
    request = driver.admit(staged=20)
    for count in range(1, 5):
        driver.step({request: [count]})
        assert driver.cache.statistics().order_rebuilds == 2 * count
    driver.cache.check_integrity()


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_rule_8_staging_takes_free_slots_only_and_is_not_use_in_the_next_step(policy: str) -> None:
    driver = new_driver(policy=policy, num_slots=14)
    one = driver.admit(staged=6)
    driver.step({one: [0, 1, 2, 3]})
    tables = driver.cache.device_pool.layer(0)
    before, used = tables.row_of_slot.clone(), tables.row_of_slot >= 0
    other = driver.admit(staged=20)  # 7 slots are free
    assert torch.equal(tables.row_of_slot[used], before[used])
    assert resident(driver.cache, other) == list(range(7))
    assert tables.num_free == 0
    staged = tables.slot_of_row[[row_of(other, position) for position in range(7)]].long()
    assert (tables.stamp[staged] < fetched(driver.cache.backend.step_number + 1)).all()
    driver.stage(other, 3)  # none free: to the host alone
    assert resident(driver.cache, other) == list(range(7))
    driver.step({other: [22, 21, 20, 19]})
    driver.cache.check_integrity()


def test_rule_9_selections_beyond_the_pool_end_in_an_error_and_the_cache_lives_on() -> None:
    driver = new_driver(policy="fifo", num_layers=1, max_requests=1)
    request = driver.admit(staged=30)
    before = snapshot(driver.cache)["requests"]
    with pytest.raises(HiSparseError, match=r"3 selected records found no slot.*6 a layer\)\. Resolve each layer once"):
        resolve_too_much(driver, request)
    assert snapshot(driver.cache)["requests"] == before
    driver.cache.check_integrity()
    driver.step({request: [0, 8, 30]})
    driver.cache.check_integrity()


def resolve_too_much(driver: Driver, request: CacheRequest) -> None:
    with driver.cache.step([request]) as step:
        driver.append(step)
        driver.cache.resolve(0, pad([[10, 11, 12, 13]]))
        assert (driver.cache.resolve(0, pad([[20, 21, 22, 23]])) == -1).sum() == 3


def test_rule_9_a_failure_in_an_undone_step_is_not_held_against_the_next() -> None:
    driver = new_driver(policy="fifo", num_layers=1, max_requests=1)
    request = driver.admit(staged=30)

    def fail() -> None:
        with driver.cache.step([request]) as step:
            driver.append(step)
            driver.cache.resolve(0, pad([[10, 11, 12, 13]]))
            driver.cache.resolve(0, pad([[20, 21, 22, 23]]))
            raise RuntimeError("attention read slot -1")

    with pytest.raises(RuntimeError, match="attention read"):
        fail()
    driver.step({request: [0]})
    driver.cache.check_integrity()


@pytest.mark.reference_only("ties inside a step have no order on the GPU")
def test_rule_10_inside_a_step_fetched_records_leave_before_hits_and_lower_rows_first() -> None:
    driver = new_driver(num_layers=1, max_requests=1, device_buffer_size=8)
    request = driver.admit(staged=8)
    driver.step({request: [7, 6]})  # the new record evicts 0, the lowest of eight equal stamps
    assert resident(driver.cache, request) == [1, 2, 3, 4, 5, 6, 7, 8]
    driver.step({request: [7, 6, 2, 0]})  # 9 evicts 1; 2 was hit; 0 evicts 3
    assert resident(driver.cache, request) == [0, 2, 4, 5, 6, 7, 8, 9]
    driver.step({request: [4, 5]})  # 10 evicts 8 (step 1), the rest is of step 2 or hit now
    leaves = []
    for _ in range(5):
        before = set(resident(driver.cache, request))
        driver.step({request: [4, 5]})
        leaves += sorted(before - set(resident(driver.cache, request)))
    assert leaves == [0, 9, 2, 6, 7]  # fetched in step 2: 0 and 9; hit in step 2: 2, 6, 7
    driver.cache.check_integrity()


@pytest.mark.reference_only("ties inside a step have no order on the GPU")
@pytest.mark.parametrize("policy", ["lru", "fifo"])
@pytest.mark.parametrize("steps_before", range(5))
def test_rule_10_eviction_is_the_same_across_the_renumbering_of_stamps(policy: str, steps_before: int) -> None:
    plain, near = (new_driver(policy=policy, max_requests=1) for _ in range(2))
    near.cache.backend.step_number = STEP_LIMIT - steps_before
    histories: list[list[list[list[int]]]] = []
    for driver in (plain, near):
        request = driver.admit(staged=14)
        histories.append([])
        for positions in CHURN:
            driver.step({request: positions})
            histories[-1].append([resident(driver.cache, request, layer) for layer in range(2)])
            assert int(driver.cache.device_pool.tables.stamp.max()) <= hit(driver.cache.backend.step_number)
            driver.cache.check_integrity()
    assert histories[0] == histories[1]
    assert near.cache.backend.step_number < 1000  # it was renumbered
    assert plain.cache.statistics().misses == near.cache.statistics().misses


def test_rule_10_the_last_stamps_before_renumbering_fit_int32() -> None:
    driver = new_driver()
    request = driver.admit(staged=10)
    driver.cache.backend.step_number = STEP_LIMIT - 1
    driver.step({request: [0, 1]})
    assert driver.cache.backend.step_number == STEP_LIMIT
    assert driver.cache.device_pool.tables.stamp.max() == hit(STEP_LIMIT)
    assert hit(STEP_LIMIT) < 2**31
    driver.stage(request, 5)
    driver.step({request: [0, 12]})
    driver.cache.check_integrity()


def test_rule_11_policies_evict_differently_and_hand_out_the_same_records() -> None:
    outputs: dict[str, list[Tensor]] = {}
    evicted: dict[str, list[list[int]]] = {}
    for policy in EVERY_POLICY:
        driver = new_driver(policy=policy, max_requests=1)
        request = driver.admit(staged=14)
        outputs[policy], evicted[policy] = [], []
        for positions in CHURN:
            slots = driver.step({request: positions})
            outputs[policy] += [driver.cache.records(layer)[slots[layer].long()] for layer in range(2)]
            evicted[policy].append(resident(driver.cache, request))
        driver.cache.check_integrity()
    assert evicted.pop("two_rate_tier") == evicted["two_rate"]  # without ranks
    assert len({str(lists) for lists in evicted.values()}) == len(EVERY_POLICY) - 1
    for found in outputs.values():
        assert all(torch.equal(a, b) for a, b in zip(found, outputs["lru"], strict=True))


# Orders


@pytest.mark.reference_only(
    "on the GPU a list that ran out is made again after the step: insert and resolve both count"
)
def test_exhausted_order_is_made_again_and_counted() -> None:
    driver = new_driver(max_requests=1)
    request = driver.admit(staged=20)  # the pool is full and no list was ever made
    driver.step({request: [0, 1]})
    assert driver.cache.statistics().exhausted_orders == 2  # once a layer
    driver.step({request: [0, 1]})
    assert driver.cache.statistics().exhausted_orders == 2
    driver.cache.check_integrity()


@pytest.mark.reference_only("ties inside a step have no order on the GPU")
def test_lru_is_exact_after_staging_between_steps() -> None:
    driver = new_driver(num_layers=1, max_requests=1, top_k=3, device_buffer_size=4)
    request = driver.admit()
    for positions in ([0], [0, 1], [0, 1, 2]):
        driver.step({request: positions})
    driver.stage(request, 3)  # position 3 takes the last free slot and is the newest
    driver.step({request: []})
    assert resident(driver.cache, request) == [1, 2, 3, 6]
    driver.cache.check_integrity()


def test_fifo_is_exact_after_a_slot_changed_hands_between_steps() -> None:
    driver = new_driver(policy="fifo", num_layers=1, top_k=1, device_buffer_size=2)
    stays, leaves = driver.admit(), driver.admit()
    driver.step({leaves: [0]})
    driver.step({stays: [0]})
    driver.step({stays: [0]})  # the list is: the slot of `leaves`, then those of `stays`
    driver.cache.retire(leaves)
    comes = driver.admit(staged=2)  # fills the pool; its records are the youngest
    driver.step({stays: []})
    assert resident(driver.cache, comes) == [0, 1]
    assert resident(driver.cache, stays) == [1, 2]
    driver.cache.check_integrity()


def test_while_everything_fits_nothing_is_fetched() -> None:
    driver = new_driver(num_slots=40)
    one, other = driver.admit(staged=12), driver.admit(staged=8)
    for positions in CHURN:
        driver.step({one: positions[:2], other: [p % 8 for p in positions[:1]]})
    statistics = driver.cache.statistics()
    assert (statistics.misses, statistics.fetched_bytes, statistics.exhausted_orders) == (0, 0, 0)
    assert statistics.hits == 2 * 3 * len(CHURN)
    assert statistics.miss_rate == 0
    driver.cache.check_integrity()


def test_statistics_of_a_cache_that_did_nothing() -> None:
    cache = small_cache()
    assert cache.statistics() == (0, 0, 0, 0, 0)
    assert cache.statistics().miss_rate == 0
    cache.check_integrity()


@pytest.mark.reference_only("ties inside a step have no order on the GPU")
def test_miss_rate() -> None:
    driver = new_driver(num_layers=1, max_requests=1)
    request = driver.admit(staged=20)
    driver.step({request: [1, 2, 19, 18]})
    assert driver.cache.statistics().miss_rate == 0.5
    driver.cache.check_integrity()
