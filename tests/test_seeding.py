"""Seeding: a request's probable selections are on the device before its first step."""

from typing import Any

import pytest
import torch

from tests.caches import Driver, new_driver, resident, snapshot

pytestmark = pytest.mark.usefixtures("each_backend")


def crowded(**changes: object) -> Driver:
    """A driver whose pool is full of somebody else's records."""
    driver = new_driver(**({"max_positions": 64} | changes))
    driver.admit(staged=12)
    return driver


def seeds(*positions: int) -> torch.Tensor:
    return torch.tensor(positions, dtype=torch.int32)


def test_seeded_positions_do_not_miss() -> None:
    driver = crowded()
    request = driver.admit(staged=30)
    assert resident(driver.cache, request) == []
    driver.cache.seed(request, {0: seeds(29, 3, 11, 7, 20, 1), 1: seeds(5)})
    assert resident(driver.cache, request) == [1, 3, 7, 11, 20, 29]
    assert resident(driver.cache, request, 1) == [5]
    before = driver.cache.statistics(0).misses
    driver.step({request: [3, 11, 20, 30]})
    assert driver.cache.statistics(0).misses == before
    driver.cache.check_integrity()


def test_the_best_stay_longest() -> None:
    driver = new_driver(max_requests=1, num_slots=12)
    request = driver.admit(staged=32)  # 0 to 11 have slots
    driver.cache.seed(request, {layer: seeds(31, 30, 29, 28, 15, 14) for layer in range(2)})
    driver.step({request: [16, 17, 18, 19]})
    driver.step({request: [20, 21]})
    assert {28, 29, 30, 31} <= set(resident(driver.cache, request))
    assert not {14, 15} & set(resident(driver.cache, request))


def test_layers_that_share_a_selection_are_seeded_with_their_anchor() -> None:
    driver = crowded(num_layers=3, anchors=(0, 0, 2))
    request = driver.admit(staged=30)
    driver.cache.seed(request, {0: seeds(4, 8), 2: seeds(-1, 9)})
    for layer, wanted in enumerate(([4, 8], [4, 8], [9])):
        assert resident(driver.cache, request, layer) == wanted
    driver.cache.check_integrity()  # compares the bytes


def test_nothing_to_seed() -> None:
    driver = crowded()
    request = driver.admit(staged=3)
    before = snapshot(driver.cache)
    driver.cache.seed(request, {})
    driver.cache.seed(request, {0: seeds()})
    assert snapshot(driver.cache) == before


def test_what_cannot_be_seeded() -> None:
    driver = crowded(num_layers=2, anchors=(0, 0))
    cache, request = driver.cache, driver.admit(staged=20)
    before = snapshot(cache)
    cases: tuple[tuple[Any, str], ...] = (
        ({0: seeds(*range(7))}, r"m at most device_buffer_size = 6, got torch.int32 \[7\]"),
        ({0: seeds(1)[None]}, r"must be int32 \[m\]"),
        ({0: seeds(1).long()}, "got torch.int64"),
        ({0: seeds(20)}, r"positions\[0, 0\] is 20, but that request's history has 20 positions"),
        ({0: [1, 2]}, "got a list"),
        ({"0": seeds(1)}, "layer must be a number, got '0'"),
        ({0: seeds(3, 3)}, "names position 3 twice"),
        ({1: seeds(3)}, "uses the selection of layer 0"),
        ({2: seeds(3)}, "layer must be 0 to 1"),
    )
    for positions, message in cases:
        with pytest.raises(ValueError, match=message):
            cache.seed(request, positions)
    with cache.step([request]) as step:
        driver.append(step)
        with pytest.raises(ValueError, match="seed cannot be called inside a step"):
            cache.seed(request, {0: seeds(1)})
    cache.retract(request)
    with pytest.raises(ValueError, match="retracted"):
        cache.seed(request, {0: seeds(1)})
    assert before["requests"] != snapshot(cache)["requests"]


def test_room_for_all() -> None:
    driver = new_driver()  # 12 slots a layer
    assert driver.cache.has_slots_for_all(12)
    request = driver.admit(staged=7)
    assert driver.cache.has_slots_for_all(5)
    assert not driver.cache.has_slots_for_all(6)
    driver.cache.retract(request)
    assert driver.cache.has_slots_for_all(12)
