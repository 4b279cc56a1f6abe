"""The whole cache, and an engine on it, over the GPU backend: same bytes, same integrity, same logits.

Which slots are evicted may differ from the reference, so exact miss counts are not compared here.
"""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from hisparse.checkpoint import load
from hisparse.checkpoint.tiny import write_tiny
from hisparse.commands.verify import build_verification
from hisparse.config import HiSparseConfig
from hisparse.engine import SamplingParams, build_engine
from tests.test_cache_properties import BytesMachine

SETTINGS = settings(max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))


class GpuMachine(BytesMachine):
    device = "cuda"


class FifoGpuMachine(GpuMachine):
    policy = "fifo"


class RandomGpuMachine(GpuMachine):
    policy = "random"


class TierGpuMachine(GpuMachine):
    policy = "two_rate_tier"


@pytest.mark.gpu
@pytest.mark.parametrize("machine", [GpuMachine, FifoGpuMachine, RandomGpuMachine, TierGpuMachine])
def test_any_sequence_of_calls(machine: Any) -> None:
    run_state_machine_as_test(machine, settings=SETTINGS)


@pytest.mark.gpu
@pytest.mark.parametrize("per_kv_head", [False, True])
def test_generation_equals_the_resident_run(tmp_path: Path, per_kv_head: bool) -> None:
    loaded = load(write_tiny(tmp_path / "tiny", max_positions=4096), device="cuda")
    config = HiSparseConfig(top_k=64, device_buffer_size=80, max_running_requests=3, quest_per_kv_head=per_kv_head)
    verification = build_verification(loaded, config, None)
    sizes = [1500, 300, 90, 700]
    engine = build_engine(loaded, config, [size + 40 for size in sizes], observers=[verification])
    requests = [
        engine.submit([i % 250 for i in range(size)], SamplingParams(max_tokens=40, temperature=0.8, seed=size))
        for size in sizes
    ]
    steps = 0
    while not engine.scheduler.is_idle:
        engine.step()
        steps += 1
        if steps % 9 == 0 and engine.scheduler.running and engine.scheduler.running[0].output:
            engine.retract(engine.scheduler.running[0])
    assert verification.equal, verification.first_difference
    assert all(request.finish_reason for request in requests)
    assert engine.runner.cache.statistics().misses > 0
    engine.runner.cache.check_integrity()
