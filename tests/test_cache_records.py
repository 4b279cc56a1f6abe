"""Bytes in, bytes out, whatever their stride, dtype and neighbours."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.caches import (
    CHURN,
    EVERY_POLICY,
    default_device,
    host_records,
    make_records,
    new_driver,
    row_of,
    small_cache,
    snapshot,
)

pytestmark = pytest.mark.usefixtures("each_backend")


def float_records(count: int) -> Tensor:
    records = torch.randn(count, 8, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    return records.to(default_device())


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
    before = snapshot(cache)
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


def test_positions_past_the_history_are_pads_without_debug_mode() -> None:
    driver = new_driver(debug=False)
    request = driver.admit(staged=10)
    cache = driver.cache
    beyond = torch.tensor([[3, 11, 63, 9999]], dtype=torch.int32)  # 11 comes next, 63 is in its pages, 9999 is not
    with cache.step([request]) as step:
        driver.append(step)
        for layer in range(2):
            assert (cache.resolve(layer, beyond)[0] >= 0).tolist() == [True, False, False, False]
    driver.step({request: [10, 11]})
    cache.check_integrity()


def test_a_step_carries_its_tokens() -> None:
    driver = new_driver()
    requests = [driver.admit(staged=3), driver.admit(staged=9)]
    for tokens, carried in (((7, 2**40), [7, 2**40]), ((), [0, 0])):
        with driver.cache.step(requests, tokens=tokens) as step:
            driver.append(step)
            assert step.tokens.tolist() == carried
            assert step.positions.tolist() == [request.length for request in requests]


def test_padded_lines_get_no_slots_and_write_nothing() -> None:
    driver = new_driver(max_requests=3, with_state=True)
    one, other = driver.admit(staged=10), driver.admit(staged=10)
    cache = driver.cache
    before = host_records(cache).clone()
    garbage = torch.full((1, 8), 77, dtype=torch.int32)
    selection = torch.tensor([[3, 10, -1], [0, 99999, 5], [7, 7, -5]], dtype=torch.int32)
    with cache.step([other], batch_size=3) as step:
        assert step.batch_size == 3
        assert [line.tolist() for line in step.inputs[:3, 1:]] == [[-1, -1], [0, 0], [0, 0]]
        for layer in range(2):
            new = make_records(9, layer, 10, 1)
            cache.append(layer, torch.cat([new, garbage, garbage]))
            slots = cache.resolve(layer, selection)
            assert (slots[0] >= 0).tolist() == [True, True, False]
            assert (slots[1:] == -1).all()
            assert torch.equal(cache.records(layer)[slots[0, 1].long()].view(torch.int32), new[0])
    changed = (host_records(cache) != before).any(dim=2).nonzero().tolist()
    assert changed == [[layer, row_of(other, 10)] for layer in range(2)]
    assert (one.length, other.length) == (10, 11)
    cache.check_integrity()
