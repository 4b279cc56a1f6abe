"""Padded lines of a step: other requests' records and selection state stay as they are."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from hisparse.checkpoint import load
from hisparse.checkpoint.tiny import write_tiny
from hisparse.checkpoint.tiny_mla import write_tiny_mla
from hisparse.config import HiSparseConfig
from hisparse.engine import build_engine
from hisparse.engine.batch import DecodeBatch, PrefillChunk
from hisparse.engine.family import state_of
from hisparse.engine.runner import buckets_up_to
from hisparse.step import Step
from tests.engine.engines import VerifiedRun, prompt_of

CONFIG = HiSparseConfig(top_k=32, device_buffer_size=64)


@pytest.mark.parametrize("kind", ["llama", "glm-5.2"])
def test_a_padded_step_gives_the_same_hidden_states_and_touches_nobody(kind: str, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path) if kind == "llama" else write_tiny_mla(tmp_path, kind, top_k=32)
    outputs = []
    for batch_size in (1, 3):
        engine = build_engine(load(folder), CONFIG, [200, 200, 200])
        runner = engine.runner
        state_of(runner.cache).data.zero_()  # no NaN, which equals nothing
        for request_id in range(3):
            runner.admit(request_id, 200)
            runner.prefill(PrefillChunk(request_id, tuple(prompt_of(100, seed=request_id)), 0, 200, is_last=True))
        cache, state = runner.cache, state_of(runner.cache)
        requests = [runner._requests[request_id] for request_id in range(3)]
        others = [page for request in requests[1:] for page in request.state_pages]
        before = state.data[:, others].clone()
        tokens = torch.tensor([5, *[0] * (batch_size - 1)])
        with cache.step(requests[:1], batch_size=batch_size) as step:
            hidden = runner.family.forward_step(cache, step, tokens)
        assert torch.equal(state.data[:, others], before)
        assert [request.length for request in requests] == [101, 100, 100]
        cache.check_integrity()
        outputs.append(hidden[0])
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "glm-5.2"])
def test_padded_decodes_equal_padded_resident_ones(kind: str, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path) if kind == "llama" else write_tiny_mla(tmp_path, kind, top_k=32)
    run = VerifiedRun(load(folder), CONFIG, [300] * 6)
    run.engine.scheduler.buckets = (2, 4)
    for length in (30, 200, 77, 90, 150, 10):
        run.submit(length, max_tokens=8 + length % 7)  # not all end together
    run.finish()
    assert {batch.num_lines for batch in run.record.decodes} == {2, 4}
    assert any(batch.padding for batch in run.record.decodes)


def test_an_observed_step_is_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an observer does with a selection, such as copying it to the host, cannot be captured."""

    class Ear:
        heard, wants = 0, True

        def hears(self, requests: object) -> bool:
            return self.wants

        def selected(self, layer: int, selection: Tensor, step: Step, best: object) -> None:
            self.heard += 1

    engine = build_engine(load(write_tiny(tmp_path)), CONFIG, [200])
    runner = engine.runner
    recorded: list[int] = []
    runner._records = True
    monkeypatch.setattr(runner, "_record", recorded.append)
    runner.cache.observer = ear = Ear()
    runner.admit(0, 200)
    runner.prefill(PrefillChunk(0, (1, 2, 3), 0, 200, is_last=True))
    runner.decode(DecodeBatch((0,), (5,), (3,)))
    assert ear.heard
    assert not recorded
    ear.wants = False
    runner.decode(DecodeBatch((0,), (5,), (4,)))
    assert recorded == [1]


def test_buckets() -> None:
    assert buckets_up_to(1) == (1,)
    assert buckets_up_to(3) == (1, 2, 3)
    assert buckets_up_to(8) == (1, 2, 4, 8)
    assert buckets_up_to(20) == (1, 2, 4, 8, 16, 20)
