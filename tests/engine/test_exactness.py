"""The hierarchical run against the resident one, bit for bit (docs/architecture.md, what always holds, 3).

Memory starts as garbage and debug mode checks every selection. `VerifiedRun.finish` asserts equality of every
step, that records were fetched, that no table contradicts another, and that nothing is held at the end.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from hisparse.checkpoint.tiny import VOCAB_SIZE
from hisparse.config import HiSparseConfig
from hisparse.engine import Request, RequestState
from hisparse.engine.residency import CacheResidency
from hisparse.errors import IntegrityError, ModelOutputError
from hisparse.order import POLICIES
from hisparse.ranking import Best
from hisparse.selectors import AGGREGATIONS
from tests.engine.engines import Checkpoints, Tiny, VerifiedRun, verification_of

LENGTHS = (300, 70, 17, 180)
LENGTHS_TOTAL = [length + 12 for length in LENGTHS]


def config_of(**changes: Any) -> HiSparseConfig:
    """A pool far smaller than the prompts, chunks that end in the middle of pages."""
    return HiSparseConfig(**({"top_k": 48, "device_buffer_size": 56, "prefill_chunk": 100} | changes))


def run_batch(tiny: Tiny, config: HiSparseConfig) -> VerifiedRun:
    """Four requests of different lengths together, to their end."""
    run = VerifiedRun(tiny.loaded, config, LENGTHS_TOTAL)
    for length in LENGTHS:
        run.submit(length)
    run.finish()
    assert max(len(batch.request_ids) for batch in run.record.decodes) == len(LENGTHS)
    return run


def test_one_request(tiny: Tiny) -> None:
    run = VerifiedRun(tiny.loaded, config_of(), [320])
    request = run.submit(300, max_tokens=20)
    run.finish()
    assert len(request.output) == 20


def test_a_greedy_request(tiny: Tiny) -> None:
    run = VerifiedRun(tiny.loaded, config_of(), [320])
    run.submit(300, temperature=0.0)
    run.finish()


def test_mixed_lengths(tiny: Tiny) -> None:
    run_batch(tiny, config_of())


@pytest.mark.parametrize("top_k", [16, 48, 64])
def test_a_selection_one_below_the_reservation(top_k: int, tiny: Tiny) -> None:
    run_batch(tiny, config_of(top_k=top_k, device_buffer_size=top_k + 1))


def test_a_pool_so_tight_that_every_step_fetches(tiny: Tiny) -> None:
    run = VerifiedRun(tiny.loaded, config_of(top_k=32, device_buffer_size=33), [450])
    run.submit(400, max_tokens=40)
    run.finish()
    assert len(run.decode_misses) == 39
    assert min(run.decode_misses) > 0


@pytest.mark.parametrize("top_k", [17, 40, 63])
def test_a_top_k_between_pages(top_k: int, tiny: Tiny) -> None:
    run_batch(tiny, config_of(top_k=top_k, device_buffer_size=top_k + 1))


def test_a_context_shorter_than_top_k_fetches_nothing(tiny: Tiny) -> None:
    run = VerifiedRun(tiny.loaded, config_of(top_k=64, device_buffer_size=65), [60])
    run.submit(30, max_tokens=30)
    run.finish(fetched=False)


def test_a_context_that_grows_past_top_k(tiny: Tiny) -> None:
    run = VerifiedRun(tiny.loaded, config_of(top_k=64, device_buffer_size=65), [200])
    run.submit(1, max_tokens=120)
    run.finish()
    assert not any(run.decode_misses[:63])


def test_a_prompt_of_one_token_beside_a_long_one(tiny: Tiny) -> None:
    run = VerifiedRun(tiny.loaded, config_of(), [320, 20])
    run.submit(1)
    run.submit(300)
    run.finish()


@pytest.mark.parametrize("prefill_chunk", [512, 1024, 4096])
def test_a_prompt_longer_than_a_tile_and_than_the_pool(prefill_chunk: int, tiny: Tiny) -> None:
    run = VerifiedRun(tiny.loaded, config_of(prefill_chunk=prefill_chunk), [2600])
    run.submit(2500, max_tokens=6)
    run.finish()


def test_chunks_of_one_position(tiny: Tiny) -> None:
    run = VerifiedRun(tiny.loaded, config_of(prefill_chunk=1), [100])
    run.submit(75)
    run.finish()


def test_seeding_spares_the_first_steps_most_misses(tiny: Tiny) -> None:
    misses = {}
    for seeds in (None, 96, 0):
        run = VerifiedRun(tiny.loaded, config_of(device_buffer_size=96, seed_positions=seeds), [312])
        run.submit(300)
        run.finish()
        misses[seeds] = run.decode_misses[0]
    assert misses[96] <= misses[None] < misses[0], misses


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("device_buffer_size", [49, 70])
def test_policies(policy: str, device_buffer_size: int, tiny: Tiny) -> None:
    run_batch(tiny, config_of(policy=policy, device_buffer_size=device_buffer_size))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("per_kv_head", [False, True], ids=["one a layer", "one a KV head"])
def test_aggregations(aggregation: str, per_kv_head: bool, tiny: Tiny) -> None:
    run_batch(tiny, config_of(quest_aggregation=aggregation, quest_per_kv_head=per_kv_head))


def test_selections_of_kv_heads_differ(tiny: Tiny) -> None:
    """So that a group which read another group's slots could not go unnoticed above."""
    run = VerifiedRun(tiny.loaded, config_of(quest_per_kv_head=True), [320])
    cache = run.engine.runner.cache
    assert cache.layout.num_layers == 2 * tiny.loaded.model.config.num_layers
    run.submit(300)
    run.step(8)
    rows = cache.device_pool.tables.row_of_slot.sort(dim=-1).values
    assert not torch.equal(rows[0], rows[1])
    run.finish()


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_architectures_and_dtypes(architecture: str, dtype: torch.dtype, checkpoints: Checkpoints) -> None:
    run_batch(checkpoints.get(architecture, dtype), config_of())


@pytest.mark.parametrize("num_kv_heads", [1, 4])
def test_other_numbers_of_kv_heads(num_kv_heads: int, checkpoints: Checkpoints) -> None:
    run_batch(checkpoints.get("LlamaForCausalLM", num_kv_heads=num_kv_heads), config_of())


def test_the_selector_all(tiny: Tiny) -> None:
    run = VerifiedRun(tiny.loaded, HiSparseConfig(top_k=350, selector="all", prefill_chunk=100), [320, 80])
    run.submit(300)
    run.submit(60)
    run.finish(fetched=False)  # B covers the whole history


def test_requests_joining_and_leaving(tiny: Tiny) -> None:
    """Two run at a time; each that ends makes room for the next, in the middle of the other's decoding."""
    lengths, budgets = (300, 200, 120, 260, 90), (25, 4, 9, 3, 20)
    sizes = [length + budget for length, budget in zip(lengths, budgets, strict=True)]
    run = VerifiedRun(tiny.loaded, config_of(max_running_requests=2), sizes)
    for length, budget in zip(lengths, budgets, strict=True):
        run.submit(length, max_tokens=budget)
    run.finish()
    assert {len(batch.request_ids) for batch in run.record.decodes} == {1, 2}
    assert len({batch.request_ids for batch in run.record.decodes}) >= 4


def test_a_request_that_comes_late(tiny: Tiny) -> None:
    run = VerifiedRun(tiny.loaded, config_of(), [320, 220])
    run.submit(300, max_tokens=20)
    run.step(8)
    late = run.submit(200)
    run.step()
    assert late.state is RequestState.PREFILLING
    run.finish()


def test_a_request_cancelled_in_the_middle(tiny: Tiny) -> None:
    run = VerifiedRun(tiny.loaded, config_of(), LENGTHS_TOTAL)
    requests = [run.submit(length) for length in LENGTHS]
    run.step_until(lambda: len(requests[-1].output) == 3)
    run.engine.cancel(requests[0])
    run.finish()


def test_retract_and_resume(tiny: Tiny) -> None:
    run = VerifiedRun(tiny.loaded, config_of(), LENGTHS_TOTAL)
    requests = [run.submit(length) for length in LENGTHS]
    for count, request in enumerate(requests, start=3):
        run.step_until(lambda count=count: len(requests[-1].output) == count)  # type: ignore[misc]
        run.engine.retract(request)
        assert request.state is RequestState.RETRACTED
        run.engine.runner.cache.check_integrity()
    run.finish()
    assert {len(request.output) for request in requests} == {12}


@pytest.mark.parametrize("per_kv_head", [False, True], ids=["one a layer", "one a KV head"])
def test_retracted_while_its_prompt_is_read(per_kv_head: bool, tiny: Tiny) -> None:
    """After each of its chunks; requests that matter more take its place and its slots meanwhile."""
    small_steps = {"max_running_requests": 1, "prefill_chunk": 50, "max_num_batched_tokens": 51}
    config = config_of(host_to_device_ratio=14.0, quest_per_kv_head=per_kv_head, **small_steps)
    run = VerifiedRun(tiny.loaded, config, [330, 300, 300, 300])
    long = run.submit(310, max_tokens=15, priority=1)
    for count in range(1, 7):
        run.step_until(lambda count=count: long.num_prefilled == 50 * count)  # type: ignore[misc]
        urgent = run.submit(270 + count, max_tokens=4)
        run.step()
        assert (long.state, urgent.state) == (RequestState.RETRACTED, RequestState.PREFILLING)
        run.engine.runner.cache.check_integrity()
        run.step_until(lambda urgent=urgent: urgent.state is RequestState.FINISHED)  # type: ignore[misc]
    run.finish()
    assert run.engine.scheduler.num_retractions == 6
    assert long.output == output_alone(tiny, config, 310, max_tokens=15)


def output_alone(tiny: Tiny, config: HiSparseConfig, length: int, max_tokens: int) -> list[int]:
    run = VerifiedRun(tiny.loaded, config, [length + max_tokens])
    request = run.submit(length, max_tokens)
    run.finish()
    return request.output


def test_cancelled_while_retracted_from_its_prompt(tiny: Tiny) -> None:
    run = VerifiedRun(tiny.loaded, config_of(prefill_chunk=50), LENGTHS_TOTAL)
    leaving, staying = run.submit(300), run.submit(180)
    run.step_until(lambda: leaving.num_prefilled > 0)
    assert leaving.state is RequestState.PREFILLING
    run.engine.retract(leaving)
    run.engine.cancel(leaving)
    run.finish(fetched=False)
    assert len(staying.output) == 12


def test_retracted_requests_come_back_to_taken_slots(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is away, the others fill the shared pool: nothing of it is on the device when it resumes."""
    run = VerifiedRun(tiny.loaded, config_of(), [330, 290])
    away, other = run.submit(300, max_tokens=30), run.submit(250, max_tokens=40)
    run.step_until(lambda: len(other.output) == 5)
    seen = len(away.output)
    held_until(run, monkeypatch, away, lambda: len(other.output) == 20)
    assert (run.engine.runner.cache.device_pool.tables.num_free == 0).any()
    assert len(away.output) == seen < 30
    run.finish()
    assert len(away.output) == 30


@pytest.mark.parametrize("per_kv_head", [False, True], ids=["one a layer", "one a KV head"])
def test_retracted_requests_come_back_to_other_state_pages(
    per_kv_head: bool, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another request takes the place, selection state and slots of the one that is away, and stays."""
    config = config_of(max_running_requests=2, host_to_device_ratio=12.0, quest_per_kv_head=per_kv_head)
    run = VerifiedRun(tiny.loaded, config, [330, 290])
    away, leaving = run.submit(300, max_tokens=30), run.submit(250, max_tokens=9)
    run.step_until(lambda: len(leaving.output) == 5)
    before = run.engine.runner._requests[away.id].state_pages.copy()
    guest = run.submit(280, max_tokens=40)
    admit_while_away(run, monkeypatch, away, guest)
    run.step_until(lambda: away.state is RequestState.DECODING)
    assert run.engine.runner._requests[away.id].state_pages != before
    assert guest.state is RequestState.DECODING
    run.finish()


def held_until(run: VerifiedRun, monkeypatch: pytest.MonkeyPatch, request: Request, reached: Any) -> None:
    """Retract the request and let no room be found for it until `reached`."""
    run.engine.retract(request)
    with monkeypatch.context() as patch:
        patch.setattr(CacheResidency, "fits", lambda *arguments: False)
        run.step_until(reached)
        assert request.state is RequestState.RETRACTED


def admit_while_away(run: VerifiedRun, monkeypatch: pytest.MonkeyPatch, away: Request, guest: Request) -> None:
    """Retract `away`, and hide it from the scheduler until `guest` has been admitted in its place."""
    run.engine.retract(away)
    scheduler = run.engine.scheduler
    scheduler.retracted.remove(away)
    run.step_until(lambda: len(guest.output) == 3)
    scheduler.retracted.append(away)
    assert run.engine.runner.cache.statistics().misses > 0


def test_device_kv_bytes_do_not_grow(tiny: Tiny) -> None:
    run = VerifiedRun(tiny.loaded, config_of(), [2600])
    cache = run.engine.runner.cache
    seen = [device_kv(run)]
    for length in (20, 2500):
        run.submit(length, max_tokens=4)
        run.step_until(lambda: run.engine.scheduler.is_idle)
        seen.append(device_kv(run))
    run.finish()
    assert seen == [(cache.layout.device_kv_bytes, *seen[0][1:])] * 3
    assert cache.layout.full_kv_bytes(2504) > 2 * cache.layout.slots_bytes


def device_kv(run: VerifiedRun) -> tuple[int, int, int]:
    """Bytes of slots and tiles as they are allocated, and where."""
    slots, tiles = run.engine.runner.cache.device_pool.records, run.engine.runner.cache.workspace._tiles
    return slots.nbytes + tiles.nbytes, slots.data_ptr(), tiles.data_ptr()


# What a verification is worth: faults that it must see


def faulty_run(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, fault: Any) -> VerifiedRun:
    """Two requests; at the fourth decode step, `fault(records, slots)` happens in layer 2 after resolve."""
    run = VerifiedRun(tiny.loaded, config_of(), [320, 80])
    requests = [run.submit(300), run.submit(60)]
    run.step_until(lambda: len(requests[1].output) == 4)
    cache = run.engine.runner.cache
    resolve = cache.resolve

    def resolve_with_fault(layer: int, selection: Tensor, best: Best) -> Tensor:
        slots = resolve(layer, selection, best)
        if layer == 2:
            fault(cache.records(layer), slots)
        return slots

    assert run.verification.equal
    with monkeypatch.context() as patch:
        patch.setattr(cache, "resolve", resolve_with_fault)
        run.step()
    return run


def flip_a_bit(records: Tensor, slots: Tensor) -> None:
    """In the exponent of one value of the second request's first selected record."""
    records[int(slots[1, 0]), -1] ^= 0x04


def hand_out_another_slot(records: Tensor, slots: Tensor) -> None:
    slots[1, 0] = slots[0, 0]


def drop_a_slot(records: Tensor, slots: Tensor) -> None:
    slots[1, 0] = -1


@pytest.mark.parametrize("fault", [flip_a_bit, hand_out_another_slot, drop_a_slot])
def test_a_fault_is_reported_with_its_place(fault: Any, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    run = faulty_run(tiny, monkeypatch, fault)
    assert not run.verification.equal
    assert run.verification.unequal_steps == 1
    assert run.verification.first_difference is not None
    assert run.verification.first_difference.startswith("request 1, position 63: logits differ by up to ")


def test_a_damaged_slot_fails_the_integrity_check_too(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    run = faulty_run(tiny, monkeypatch, flip_a_bit)
    with pytest.raises(IntegrityError, match="layer 2: a slot's bytes"):
        run.engine.runner.cache.check_integrity()


def test_a_damaged_host_record_is_reported_once_it_is_read(tiny: Tiny) -> None:
    run = VerifiedRun(tiny.loaded, config_of(), [320])
    request = run.submit(300)
    run.step_until(lambda: len(request.output) == 1)
    run.engine.runner.cache.host_pool.records[:, :, -1] ^= 0x04
    run.step(5)
    assert not run.verification.equal
    assert run.verification.first_difference is not None
    assert run.verification.first_difference.startswith("request 0, position ")


def test_a_verification_of_nothing_is_not_equal(tiny: Tiny) -> None:
    assert not verification_of(tiny.loaded, config_of()).equal


def test_agreement_with_dense_attention(tiny: Tiny) -> None:
    """Sparse attention is not lossless: that is said beside "equal", and with `all` the agreement is whole."""
    sparse, dense = (dense_agreement(tiny, config) for config in (config_of(), all_positions()))
    assert sparse.equal
    assert sparse.agreement.steps == 11
    assert sparse.agreement.mean_divergence > 1e-4
    assert dense.equal
    assert dense.agreement.top_token_rate == 1.0
    assert dense.agreement.mean_divergence < 1e-9


def test_a_dense_run_without_finite_logits_is_an_error(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    run = VerifiedRun(tiny.loaded, config_of(), [320])
    verification = verification_of(tiny.loaded, config_of(), dense=True)
    run.engine.observers.append(verification)
    request = run.submit(300)
    run.step_until(lambda: len(request.output) == 1)
    assert verification.dense is not None
    monkeypatch.setattr(verification.dense, "run", lambda batch: torch.full((1, VOCAB_SIZE), torch.nan))
    with pytest.raises(ModelOutputError, match="the dense run produced NaN or infinite logits for request 0, position"):
        run.step()


def all_positions() -> HiSparseConfig:
    return HiSparseConfig(top_k=350, selector="all")


def dense_agreement(tiny: Tiny, config: HiSparseConfig) -> Any:
    run = VerifiedRun(tiny.loaded, config, [320])
    verification = verification_of(tiny.loaded, config, dense=True)
    run.engine.observers.append(verification)
    run.submit(300)
    run.finish(fetched=config.selector != "all")
    return verification
