"""The cache call by call: the rules of DESIGN.md section 4, what a call leaves behind, and every refusal."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hisparse.admission import CacheRequest, State
from hisparse.cache import HierarchicalCache
from hisparse.device_pool import STEP_LIMIT, fetched, hit
from hisparse.errors import CapacityError, HiSparseError, NeverFitsError
from hisparse.layout import PAGE_RECORDS
from hisparse.order import POLICIES
from tests.caches import Driver, make_records, pad, resident, row_of, small_cache, small_layout, small_state, snapshot

EVERY_POLICY = sorted(POLICIES)
CHURN = [[0, 1, 2, 3], [4, 5, 6, 7], [0, 8, 9, 10], [1, 2, 11, 12], [4, 0, 3, 9], [13, 2, 7, 1], [5, 6, 10, 0]]


def new_driver(**changes: Any) -> Driver:
    return Driver(small_cache(**changes))


# The rules of DESIGN.md section 4


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
            assert tables.stamp[step.slots[layer]].tolist() == [fetched(cache.step_number)]
            assert torch.equal(tables.row_of_slot[step.slots[layer]].long(), step.rows)
        driver.append(step)
        cache.device_pool.records[0, step.slots[0]] = 0  # lost from the slot at once
    cache.device_pool.records[0, step.slots[0]] = cache.host_pool.records[0, step.rows]
    assert torch.equal(cache.host_pool.records[0, step.rows[0]].view(torch.int32), driver.record(request, 0, 20))
    for start in (0, 4, 8):  # push it out ...
        driver.step({request: [start, start + 1, start + 2, start + 3]})
    assert 20 not in resident(cache, request)
    driver.step({request: [20]})  # ... and fetch it again
    cache.check_integrity()


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
    assert (tables.stamp[staged] < fetched(driver.cache.step_number + 1)).all()
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


@pytest.mark.parametrize("policy", ["lru", "fifo"])
@pytest.mark.parametrize("steps_before", range(5))
def test_rule_10_eviction_is_the_same_across_the_renumbering_of_stamps(policy: str, steps_before: int) -> None:
    plain, near = (new_driver(policy=policy, max_requests=1) for _ in range(2))
    near.cache.step_number = STEP_LIMIT - steps_before
    histories: list[list[list[list[int]]]] = []
    for driver in (plain, near):
        request = driver.admit(staged=14)
        histories.append([])
        for positions in CHURN:
            driver.step({request: positions})
            histories[-1].append([resident(driver.cache, request, layer) for layer in range(2)])
            assert int(driver.cache.device_pool.tables.stamp.max()) <= hit(driver.cache.step_number)
            driver.cache.check_integrity()
    assert histories[0] == histories[1]
    assert near.cache.step_number < 1000  # it was renumbered
    assert plain.cache.statistics().misses == near.cache.statistics().misses


def test_rule_10_the_last_stamps_before_renumbering_fit_int32() -> None:
    driver = new_driver()
    request = driver.admit(staged=10)
    driver.cache.step_number = STEP_LIMIT - 1
    driver.step({request: [0, 1]})
    assert driver.cache.step_number == STEP_LIMIT
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
    assert len({str(lists) for lists in evicted.values()}) == len(EVERY_POLICY)
    for found in outputs.values():
        assert all(torch.equal(a, b) for a, b in zip(found, outputs["lru"], strict=True))


# Orders


def test_exhausted_order_is_made_again_and_counted() -> None:
    driver = new_driver(max_requests=1)
    request = driver.admit(staged=20)  # the pool is full and no list was ever made
    driver.step({request: [0, 1]})
    assert driver.cache.statistics().exhausted_orders == 2  # once a layer
    driver.step({request: [0, 1]})
    assert driver.cache.statistics().exhausted_orders == 2
    driver.cache.check_integrity()


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


def test_miss_rate() -> None:
    driver = new_driver(num_layers=1, max_requests=1)
    request = driver.admit(staged=20)
    driver.step({request: [1, 2, 19, 18]})
    assert driver.cache.statistics().miss_rate == 0.5
    driver.cache.check_integrity()


# Requests come and go


def test_retract_and_resume_in_the_middle() -> None:
    driver = new_driver(with_state=True)
    one, other = driver.admit(130, staged=70), driver.admit(staged=10)
    state = driver.cache.selection_state
    assert state is not None
    state.data[:, one.state_pages] = torch.arange(9.0).view(3, 3)
    driver.step({one: [0, 69, 70], other: [1]})
    driver.cache.retract(one)
    assert (one.state, one.length, one.index, one.state_pages) == (State.RETRACTED, 71, -1, [])
    assert resident(driver.cache, one) == []
    third = driver.admit(130, staged=20)  # takes the reservation and the state's pages
    state.data[:, third.state_pages] = -1
    driver.step({other: [2], third: [3]})
    with pytest.raises(CapacityError, match="all 2 reservations"):
        driver.cache.resume(one)
    driver.cache.check_integrity()
    driver.cache.retire(third)
    driver.cache.resume(one)
    assert torch.equal(state.data[0, one.state_pages], torch.arange(9.0).view(3, 3))
    assert one.saved_state is None
    driver.step({other: [3, 11], one: [70, 0, 5, 71]})
    driver.cache.check_integrity()


def test_retract_in_the_middle_of_a_chunk() -> None:
    driver = new_driver()
    request = driver.admit()
    driver.cache.stage(0, request, 0, make_records(1, 0, 0, 5))
    driver.cache.retract(request)
    driver.cache.resume(request)
    assert (request.length, request.staged) == (0, [5, 0])
    driver.cache.stage(1, request, 0, make_records(1, 1, 0, 5))
    driver.tags[request] = [1] * 5
    driver.step({request: [0, 4, 5]})
    driver.cache.check_integrity()


def test_resume_waits_for_selection_state_pages() -> None:
    layout = small_layout()
    cache = HierarchicalCache(layout, selection_state=small_state(layout, num_pages=2))
    one = cache.admit(128)
    cache.retract(one)
    other = cache.admit(64)
    before = snapshot(cache)
    with pytest.raises(CapacityError, match="2 selection-state pages are needed and 1 are free; wait"):
        cache.resume(one)
    assert snapshot(cache) == before
    assert not cache.can_admit(65)
    cache.retire(other)
    cache.resume(one)
    cache.check_integrity()


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_a_step_that_raises_is_undone(policy: str) -> None:
    driver = new_driver(policy=policy)
    one, other = driver.admit(staged=10), driver.admit(staged=10)
    driver.step({one: [0, 1], other: [2]})
    before = snapshot(driver.cache)["requests"]

    def fail(call_append: bool) -> None:
        with driver.cache.step([one, other]) as step:
            if call_append:
                driver.append(step)
                driver.cache.resolve(0, pad([[5, 6], [7, 11]]))
            raise KeyboardInterrupt

    for call_append in (False, True):
        with pytest.raises(KeyboardInterrupt):
            fail(call_append)
        assert snapshot(driver.cache)["requests"] == before
        assert resident(driver.cache, one)[-1] < 11
        driver.cache.check_integrity()
    driver.step({other: [11, 10], one: [11, 10]})
    driver.stage(one, 4)  # positions go on where the undone step would have written
    driver.cache.check_integrity()


@pytest.mark.parametrize("leave", ["retire", "retract"])
def test_a_leaving_donor_keeps_the_shared_records(leave: str) -> None:
    driver = new_driver(with_state=True, num_slots=80)
    donor = driver.admit(130, staged=66)
    other = driver.admit(192, prefix=(donor, 64))
    assert (other.length, other.staged, other.pages[0]) == (64, [64, 64], donor.pages[0])
    assert other.pages[1] != donor.pages[1]
    driver.cache.check_integrity()
    getattr(driver.cache, leave)(donor)
    assert resident(driver.cache, other) == list(range(64))  # still there, and only those
    driver.step({other: [0, 63, 64]})
    assert driver.cache.statistics().misses == 0
    driver.cache.check_integrity()
    driver.cache.retire(other)
    driver.cache.check_integrity()


def test_a_prefix_of_a_prefix() -> None:
    driver = new_driver(max_requests=3)
    first = driver.admit(130, staged=130)
    second = driver.admit(140, staged=11, prefix=(first, 128))
    third = driver.admit(140, prefix=(second, 64))
    references = driver.cache.host_pool.pages.references
    assert [references[page] for page in first.pages] == [3, 2, 1]
    driver.cache.retire(first)
    driver.step({second: [0, 64, 129, 139], third: [0, 63, 64]})
    driver.cache.retire(second)
    driver.step({third: [1, 64]})
    driver.cache.retire(third)
    assert driver.cache.host_pool.pages.num_free == 8
    driver.cache.check_integrity()


def test_capacities() -> None:
    cache = small_cache(num_pages=3, max_requests=3)
    assert cache.can_admit(192)
    one = cache.admit(65)
    assert len(one.pages) == 2
    assert cache.can_admit(64)
    assert not cache.can_admit(65)
    before = snapshot(cache)
    with pytest.raises(CapacityError, match="2 host pages are needed and 1 are free; wait for some"):
        cache.admit(65)
    assert snapshot(cache) == before
    cache.admit(64)
    with pytest.raises(CapacityError, match="1 host pages are needed and 0 are free"):
        cache.admit(1)
    cache.retire(one)
    cache.admit(128)
    cache.check_integrity()


def test_a_shared_prefix_needs_no_pages_of_its_own() -> None:
    driver = new_driver(num_pages=3)
    donor = driver.admit(128, staged=128)
    assert not driver.cache.can_admit(192)
    other = driver.admit(192, prefix=(donor, 128))
    driver.step({other: [0, 127, 128]})
    driver.cache.check_integrity()


@pytest.mark.parametrize("with_state", [False, True])
def test_a_request_that_never_fits(with_state: bool) -> None:
    cache = small_cache(with_state=with_state, num_pages=2, max_positions=100)
    cache.admit(100)
    for call in (cache.admit, cache.can_admit):
        with pytest.raises(NeverFitsError, match=r"of 101 positions can never fit: one request can have 100 .*Shorten"):
            call(101)
    cache.check_integrity()


def test_device_kv_bytes_stay_the_same_while_a_request_grows() -> None:
    driver = new_driver(max_requests=1, num_layers=1)
    cache = driver.cache

    def allocated() -> tuple[int, list[int]]:
        tensors = (cache.device_pool.records, cache.workspace._tiles)
        return sum(t.untyped_storage().nbytes() for t in tensors), [t.data_ptr() for t in tensors]

    before = allocated()
    assert before[0] == cache.layout.device_kv_bytes
    request = driver.admit(512, staged=100)
    for _ in range(100):
        driver.step({request: [request.length, 0, request.length // 2]})
    list(cache.history(0, request, request.length))
    assert request.length == 200
    assert allocated() == before
    cache.check_integrity()


# Bytes in, bytes out


def float_records(count: int) -> Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(0))


RECORD_FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda records: records,
    "transposed": lambda records: records.t().contiguous().t(),
    "columns of a wider tensor": lambda records: torch.cat([records, records, records], 1)[:, 8:16],
    "every second line": lambda records: records.repeat_interleave(2, 0)[::2],
    "every second element": lambda records: records.repeat_interleave(2, 1)[:, ::2],
    "heads": lambda records: records.view(-1, 2, 4),
    "permuted heads": lambda records: records.view(-1, 2, 4).permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "bfloat16": lambda records: records.view(torch.bfloat16),
    "int64": lambda records: records.view(torch.int64),
    "bytes": lambda records: records.view(torch.uint8),
    "scalars of 32 bytes": lambda records: records.view(torch.complex64).view(-1, 1, 4),
}


@pytest.mark.parametrize("form", RECORD_FORMS)
def test_records_of_any_stride_and_dtype(form: str) -> None:
    cache = small_cache()
    request = cache.admit(64)
    expected = float_records(7)
    for layer in range(2):
        cache.stage(layer, request, 0, RECORD_FORMS[form](expected[:6]))
    with cache.step([request]):
        for layer in range(2):
            cache.append(layer, RECORD_FORMS[form](expected[6:]))
            slots = cache.resolve(layer, torch.tensor([[6, 0, 5]], dtype=torch.int32))
            found = cache.records(layer)[slots[0].long()].view(torch.float32)
            assert torch.equal(found, expected[[6, 0, 5]])
    (history,) = cache.history(0, request, 7)
    assert torch.equal(history.view(torch.float32), expected)
    cache.check_integrity()


def test_staging_no_records_changes_nothing() -> None:
    cache = small_cache()
    request = cache.admit(64)
    before = snapshot(cache) | {"step": 1}
    cache.stage(0, request, 0, torch.zeros(0, 8))
    assert snapshot(cache) == before
    cache.check_integrity()


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_results_do_not_depend_on_what_is_in_unused_places(policy: str) -> None:
    outcomes = []
    for fill in (0xFF, 0x00, 0x7F):
        driver = new_driver(policy=policy, fill=fill, debug=False)
        cache = driver.cache
        one, other = driver.admit(130, staged=70), driver.admit(staged=9)
        found = []
        for positions in CHURN:
            slots = driver.step({one: [p + 50 for p in positions], other: [p % 9 for p in positions[:1]]})
            used = slots[1][slots[1] >= 0].long()
            found += [slots[0], slots[1], cache.records(1)[used].clone()]
        found += [tile.clone() for tile in cache.history(1, one, one.length)]
        outcomes.append(found)
        cache.check_integrity()
    for found in outcomes[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found, outcomes[0], strict=True))


def test_selections_may_be_strided_empty_or_all_pads() -> None:
    driver = new_driver()
    one, other = driver.admit(staged=10), driver.admit(staged=10)
    cache = driver.cache
    strided = torch.tensor([[3, 5], [-1, -1], [-1, 4], [10, 0]], dtype=torch.int32).t()
    with cache.step([one, other]) as step:
        driver.append(step)
        driver.check(0, [one, other], strided, cache.resolve(0, strided))
        assert cache.resolve(1, torch.empty(2, 0, dtype=torch.int32)).shape == (2, 0)
        assert (cache.resolve(1, torch.full((2, 4), -1, dtype=torch.int32)) == -1).all()
    assert cache.statistics().hits + cache.statistics().misses == 5
    cache.check_integrity()


def test_the_largest_selection_that_fits() -> None:
    driver = new_driver(max_requests=2, top_k=5, device_buffer_size=6)
    one, other = driver.admit(staged=30), driver.admit(staged=30)
    for start in range(0, 25, 5):
        chosen = list(range(start, start + 5))
        driver.step({one: chosen, other: chosen})
        driver.cache.check_integrity()


def test_history_comes_in_tiles_and_may_be_larger_than_the_pool() -> None:
    driver = new_driver(num_pages=40, max_requests=1, num_layers=1)
    request = driver.admit(2400, staged=2300)
    cache = driver.cache
    for end in (1, 1024, 1025, 2300):
        tiles = [tile.clone() for tile in cache.history(0, request, end)]
        assert [len(tile) for tile in tiles][:-1] == [1024] * (len(tiles) - 1)
        whole = torch.cat(tiles).view(torch.int32)
        assert torch.equal(whole[:, 2], torch.arange(end, dtype=torch.int32))
    cache.check_integrity()


def test_history_of_a_retracted_request_is_refused() -> None:
    driver = new_driver(max_requests=1)
    retracted = driver.admit(staged=5)
    driver.cache.retract(retracted)
    driver.admit(staged=5)
    with pytest.raises(ValueError, match="needs a request that is active, got one that is retracted"):
        list(driver.cache.history(0, retracted, 5))
    driver.cache.check_integrity()


# Refusals: the message names the value and the way out, and nothing has changed

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
    "a request twice": (lambda c, r: enter_step(c, [r, r]), "only once"),
}


def enter_step(cache: HierarchicalCache, requests: list[CacheRequest]) -> None:
    with cache.step(requests):
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
        "selection must be on cpu, where the slots are, got meta",
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
    with pytest.raises(ValueError, match="policy must be one of fifo, lru, random, got 'mru'"):
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
            cache.append(layer, make_records(1, layer, 0, 1))
            cache.resolve(layer, pad([[0]]).to("cpu:0"))
    cache.check_integrity()


@pytest.mark.parametrize("changes", [{"max_requests": 1}, {"max_pages": 1}], ids=str)
def test_selection_state_of_another_shape_is_refused(changes: dict[str, int]) -> None:
    layout = small_layout()
    with pytest.raises(ValueError, match="selection state must have"):
        HierarchicalCache(layout, selection_state=small_state(layout, **changes))


def test_page_size_is_what_the_tests_assume() -> None:
    assert PAGE_RECORDS == 64
