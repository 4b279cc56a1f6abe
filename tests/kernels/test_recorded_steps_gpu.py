"""Whole steps in CUDA graphs: one graph a bucket, new selections and batch sizes at each replay, the right bytes."""

import pytest
import torch

from hisparse.admission import CacheRequest
from hisparse.cache import HierarchicalCache
from hisparse.device_pool import STEP_LIMIT
from tests.caches import host_records
from tests.kernels.recorded import RecordedStep, Requests, new_cache

pytestmark = pytest.mark.gpu


def replay(recorded: RecordedStep, times: int, then: Exception | None = None) -> None:
    for _ in range(times):
        recorded.graph.replay()
    if then is not None:
        raise then


UNEVEN_GROUPS = (0, 1, 2, 2, 2, 2, 6, 6, 6, 6, 10, 10, 12, 13, 13, 13, 16, 17, 17)


@pytest.mark.parametrize(
    ("policy", "slack", "anchors", "prefetch"),
    [
        *((policy, slack, (), True) for policy in ("lru", "fifo", "random", "two_rate_tier") for slack in (1, 40)),
        ("lru", 1, UNEVEN_GROUPS, True),
        ("fifo", 40, UNEVEN_GROUPS, False),
        ("lru", 40, (0,) * 19, True),
    ],
)
def test_replays_with_other_requests_selections_and_batch_sizes(
    policy: str, slack: int, anchors: tuple[int, ...], prefetch: bool
) -> None:
    cache = new_cache(policy=policy, slack=slack, anchors=anchors, prefetch=prefetch)
    requests = Requests(cache, seed=slack)
    buckets = {size: RecordedStep(cache, size) for size in (1, 2, 6)}
    running = [requests.admit(200 + 20 * i, staged=64 * i + 3) for i in range(3)]
    random = torch.Generator().manual_seed(7)
    for turn in range(40):
        live = [request for request in running if torch.rand((), generator=random) < 0.8] or running[:1]
        size = min(size for size in buckets if size >= len(live))
        requests.replay(live, buckets[size])
        if turn % 10 == 4:
            cache.retract(running[0])
            cache.resume(running[0])
        if turn % 10 == 7:
            cache.retire(running.pop(1))
            running.append(requests.admit(150, staged=90))
        if turn % 10 == 9 and len(running) < 6:
            running.append(requests.admit(300, staged=200))
        cache.check_integrity()
    total = cache.statistics()
    by_layer = [cache.statistics(layer) for layer in range(cache.layout.num_layers)]
    assert total.misses == sum(one.misses for one in by_layer) > 0
    assert total.order_rebuilds > 0
    assert all(one.fetched_bytes == one.misses * 48 for one in by_layer)


def test_recorded_and_eager_steps_take_turns() -> None:
    cache = new_cache(max_requests=2)
    requests = Requests(cache, seed=0)
    recorded = RecordedStep(cache, 2)
    one, other = requests.admit(300, staged=100), requests.admit(300, staged=50)
    for _ in range(10):
        requests.replay([one, other], recorded)
        with cache.step([other], batch_size=2):
            records = requests.new_records(cache.layout.num_layers, 2, 48)
            requests.truth[other][:, other.length] = records[:, 0]
            found = []
            for layer in range(cache.layout.num_layers):
                selection = torch.stack([requests.select(other, layer), requests.select(one, layer)])
                cache.append(layer, records[layer])
                slots = cache.resolve(layer, selection)
                assert (slots[1] == -1).all()
                found.append((selection[0], cache.records(layer)[slots[0].clamp(min=0)]))
        for layer, (selection, got) in enumerate(found):
            requests.check(layer, other, selection, got)
    cache.check_integrity()


def test_a_replay_neither_waits_for_the_cpu_nor_stops_for_statistics() -> None:
    cache = new_cache(max_requests=2)
    requests = Requests(cache, seed=1)
    recorded = RecordedStep(cache, 2)
    one = requests.admit(300, staged=100)
    requests.replay([one], recorded)
    step = cache.step([one], recorded=recorded.step)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.__enter__()
        recorded.graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda._sleep(2_000_000_000)
    done = torch.cuda.current_stream().record_event()
    before = cache.statistics()
    assert not done.query(), "statistics waited for the stream"
    step.__exit__(None, None, None)
    assert done.query()
    assert before.hits <= cache.statistics().hits
    cache.check_integrity()


@pytest.mark.parametrize("times", [0, 2])
def test_a_graph_that_is_not_replayed_once_undoes_the_step(times: int) -> None:
    cache = new_cache(max_requests=2)
    requests = Requests(cache, seed=2)
    recorded = RecordedStep(cache, 2)
    one = requests.admit(300, staged=100)
    with (
        pytest.raises(ValueError, match=f"{times} new records came to the cache in a step of 1 requests"),
        cache.step([one], recorded=recorded.step),
    ):
        replay(recorded, times)
    assert one.length == 100
    cache.check_integrity()
    for _ in range(3):
        requests.replay([one], recorded)
    cache.check_integrity()


def test_replays_outside_a_step_touch_nothing() -> None:
    cache = new_cache(max_requests=2)
    requests = Requests(cache, seed=6)
    recorded = RecordedStep(cache, 2)
    one = requests.admit(300, staged=100)
    for _ in range(3):
        before = host_records(cache).clone()
        recorded.graph.replay()  # to warm up, or by mistake
        assert torch.equal(host_records(cache), before)
        cache.check_integrity()
        requests.replay([one], recorded)
    cache.check_integrity()


def test_the_graph_of_another_bucket_is_noticed() -> None:
    cache = new_cache(max_requests=2)
    requests = Requests(cache, seed=7)
    small, large = RecordedStep(cache, 1), RecordedStep(cache, 2)
    both = [requests.admit(300, staged=100), requests.admit(300, staged=30)]
    with (
        pytest.raises(ValueError, match="1 new records came to the cache in a step of 2 requests"),
        cache.step(both, recorded=large.step),
    ):
        replay(small, times=1)
    assert [request.length for request in both] == [100, 30]
    cache.check_integrity()
    requests.replay(both, large)
    cache.check_integrity()


def test_stamps_are_renumbered_under_recorded_steps() -> None:
    cache = new_cache(max_requests=2, num_layers=3)
    requests = Requests(cache, seed=8)
    recorded = RecordedStep(cache, 2)
    both = [requests.admit(300, staged=100), requests.admit(300, staged=30)]
    for _ in range(3):
        requests.replay(both, recorded)
    cache.backend.step_number = STEP_LIMIT - 3
    for _ in range(8):
        requests.replay(both, recorded)
        cache.check_integrity()
    assert cache.backend.step_number < 10_000


@pytest.mark.parametrize("wrong", ["a layer without append", "an exception", "a read-back"])
def test_a_recording_that_fails_leaves_the_cache_as_it_was(wrong: str) -> None:
    cache = new_cache(max_requests=2)
    requests = Requests(cache, seed=9)
    one = requests.admit(300, staged=100)
    good = RecordedStep(cache, 2)
    requests.replay([one], good)
    records = torch.zeros(2, 48, dtype=torch.uint8, device="cuda")
    selection = torch.zeros(2, 1, dtype=torch.int32, device="cuda")

    def record() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()), cache.record_step(2):
            cache.append(0, records)
            slots = cache.resolve(0, selection)
            if wrong == "an exception":
                raise RuntimeError("the model broke")
            if wrong == "a read-back":
                slots.max().item()

    with pytest.raises(Exception):  # noqa: B017, PT011 - a failed capture raises whatever torch makes of it
        record()
    torch.cuda.synchronize()
    for _ in range(3):
        requests.replay([one], good)
    with cache.step([one]):
        cache_appends(cache, requests, one)
    cache.check_integrity()


def cache_appends(cache: HierarchicalCache, requests: Requests, request: CacheRequest) -> None:
    """An eager step that appends in every layer and selects nothing."""
    records = requests.new_records(cache.layout.num_layers, 1, 48)
    requests.truth[request][:, request.length] = records[:, 0]
    for layer in range(cache.layout.num_layers):
        cache.append(layer, records[layer])


def test_what_is_refused_before_the_device_hears_of_it_leaves_the_step_count_right() -> None:
    cache = new_cache(max_requests=2)
    requests = Requests(cache, seed=10)
    one = requests.admit(300, staged=10)
    with pytest.raises(ValueError, match="records must be on cuda:0, where the slots are, got cpu"):
        cache.stage(0, one, 10, torch.zeros(1, 48, dtype=torch.uint8))
    with cache.step([one]):
        cache_appends(cache, requests, one)
    cache.check_integrity()


def test_a_step_that_fails_after_its_replay_is_undone() -> None:
    cache = new_cache(max_requests=2)
    requests = Requests(cache, seed=3)
    recorded = RecordedStep(cache, 2)
    one, other = requests.admit(300, staged=100), requests.admit(300, staged=30)
    requests.replay([one, other], recorded)
    with pytest.raises(RuntimeError, match="sampler"), cache.step([other], recorded=recorded.step):
        replay(recorded, times=1, then=RuntimeError("the sampler broke"))
    assert (one.length, other.length) == (101, 31)
    cache.check_integrity()
    requests.replay([one, other], recorded)
    cache.check_integrity()


def test_refusals() -> None:
    cache = new_cache(max_requests=3)
    requests = Requests(cache, seed=4)
    recorded = RecordedStep(cache, 2)
    three = [requests.admit(100, staged=10) for _ in range(3)]
    with (
        pytest.raises(ValueError, match="batch size 2 has no room for 3 requests"),
        cache.step(three, recorded=recorded.step),
    ):
        pass
    with (
        pytest.raises(ValueError, match="append is part of the recorded step"),
        cache.step(three[:1], recorded=recorded.step),
    ):
        cache.append(0, recorded.records[0])
    with pytest.raises(ValueError, match=r"inside `with torch\.cuda\.graph"), cache.record_step(2):
        pass
    with pytest.raises(ValueError, match="batch_size must be 1 to max_requests = 3, got 4"), cache.record_step(4):
        pass
    cache.check_integrity()
    requests.replay(three[:2], recorded)
    cache.check_integrity()


def outputs_of_a_run(cache: HierarchicalCache, recorded: RecordedStep) -> torch.Tensor:
    """The bytes that attention would have read in four steps of the same seed."""
    requests = Requests(cache, seed=5)
    running = [requests.admit(200, staged=150) for _ in range(4)]
    outputs = []
    for _ in range(4):
        requests.replay(running, recorded)
        for slots, got in zip(recorded.slots, recorded.outputs, strict=True):
            outputs.append(torch.where(slots[..., None] >= 0, got, 0))
    for request in running:
        cache.retire(request)
    return torch.cat(outputs)


def test_a_hundred_runs_of_one_seed_give_the_same_outputs() -> None:
    cache = new_cache(max_requests=4, num_layers=3)
    recorded = RecordedStep(cache, 4)
    first = outputs_of_a_run(cache, recorded)
    for _ in range(99):
        assert torch.equal(outputs_of_a_run(cache, recorded), first)
    cache.check_integrity()
