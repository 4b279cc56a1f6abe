"""Requests come and go: retract, resume, undo, shared prefixes, capacities."""

import pytest
import torch

from hisparse.admission import State
from hisparse.cache import HierarchicalCache
from hisparse.errors import CapacityError, NeverFitsError
from tests.caches import (
    EVERY_POLICY,
    make_records,
    new_driver,
    pad,
    resident,
    small_cache,
    small_layout,
    small_state,
    snapshot,
)


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
