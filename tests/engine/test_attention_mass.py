"""The attention-mass selector and the two-rate policy in the engine: the hierarchy changes no output."""

import pytest

from hisparse.config import HiSparseConfig
from hisparse.engine.build import build_family
from hisparse.selectors import AttentionMass
from tests.engine.engines import Tiny, VerifiedRun


@pytest.mark.parametrize("policy", ["lru", "two_rate_tier"])
def test_outputs_equal_a_resident_run(tiny: Tiny, policy: str) -> None:
    config = HiSparseConfig(
        top_k=8,
        device_buffer_size=12,
        selector="attention_mass",
        policy=policy,
        max_running_requests=2,
        prefill_chunk=32,
    )
    run = VerifiedRun(tiny.loaded, config, [140, 90])
    requests = [run.submit(length, max_tokens=25) for length in (100, 50)]
    run.step_until(lambda: len(requests[0].output) > 8)
    run.engine.retract(requests[1])
    run.finish()


def test_the_configuration_chooses_it(tiny: Tiny) -> None:
    family = build_family(HiSparseConfig(top_k=8, selector="attention_mass"), tiny.loaded.model)
    assert isinstance(family.selector, AttentionMass)  # type: ignore[attr-defined]
