"""DeepSeek-V3.2 and GLM-5 through the whole engine: hierarchical equals resident bit for bit, and transformers' logits.

Shared indexers in every notation, chunked prefill longer than top_k, batches of mixed lengths, requests that leave
the device and come back, FP8 records.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hisparse.checkpoint import Loaded, load
from hisparse.checkpoint.tiny_mla import write_tiny_mla
from hisparse.config import HiSparseConfig
from hisparse.engine import SamplingParams, build_engine
from hisparse.engine.build import build_family
from hisparse.errors import ModelOutputError
from hisparse.models import SparseMla
from hisparse.selectors import dsa
from tests.engine.engines import Record, VerifiedRun, assert_clean, garbage_engine, prompt_of
from tests.engine.test_second_opinion import their_logits, their_model

NAMES = ("deepseek-v3.2", "glm-5.1", "glm-5.2")
TOP_K = 48
LENGTHS = (300, 20, 131, 64)
TIGHT = HiSparseConfig(top_k=TOP_K, device_buffer_size=TOP_K + 1, max_running_requests=3, prefill_chunk=100)


def tiny(folder: Path, name: str, dtype: torch.dtype = torch.float32, **options: object) -> Loaded:
    """A tiny checkpoint that no token stops."""
    return replace(load(write_tiny_mla(folder / name, name, top_k=TOP_K, **options), dtype=dtype), stop_token_ids=())  # type: ignore[arg-type]


def run_and_compare(loaded: Loaded, config: HiSparseConfig, *, retract: bool = False) -> VerifiedRun:
    run = VerifiedRun(loaded, config, [length + 40 for length in LENGTHS])
    for length in LENGTHS:
        run.submit(length, max_tokens=30)
    turns = from_prompts = 0
    while retract and not run.engine.scheduler.is_idle:
        run.step(2)
        if running := run.engine.scheduler.running:
            request = running[turns % len(running)]
            from_prompts += 0 < request.num_prefilled < len(request.prompt)
            run.engine.retract(request)
        turns += 1
    assert bool(from_prompts) == retract
    run.finish()
    return run


@pytest.mark.parametrize("policy", ["lru", "fifo", "two_rate_tier"])
@pytest.mark.parametrize("name", NAMES)
def test_hierarchical_equals_resident(name: str, policy: str, tmp_path: Path) -> None:
    run_and_compare(tiny(tmp_path, name), replace(TIGHT, policy=policy))


@pytest.mark.parametrize("name", NAMES)
def test_requests_that_leave_the_device_and_come_back(name: str, tmp_path: Path) -> None:
    run_and_compare(tiny(tmp_path, name), replace(TIGHT, device_buffer_size=3 * TOP_K), retract=True)


@pytest.mark.parametrize("name", ["deepseek-v3.2", "glm-5.2"])
@pytest.mark.parametrize(("records", "keys"), [("auto", "auto"), ("fp8", "auto"), ("auto", "fp8"), ("fp8", "fp8")])
def test_bfloat16_and_fp8(name: str, records: str, keys: str, tmp_path: Path) -> None:
    config = replace(TIGHT, kv_cache_dtype=records, index_cache_dtype=keys)
    run_and_compare(tiny(tmp_path, name, dtype=torch.bfloat16), config)


@pytest.mark.parametrize("notation", ["types", "pattern", "frequency"])
def test_shared_layers_have_no_tables_and_no_state_of_their_own(notation: str, tmp_path: Path) -> None:
    loaded = tiny(tmp_path, "glm-5.2", notation=notation)
    engine = build_engine(loaded, TIGHT, [100])
    assert isinstance(loaded.model, SparseMla)
    anchors, cache = loaded.model.config.anchors, engine.runner.cache
    assert cache.layout.anchors == anchors
    num_groups = len(set(anchors))
    assert num_groups < len(anchors)
    assert cache.device_pool.tables.slot_of_row.shape[0] == num_groups
    assert cache.selection_state is not None
    assert cache.selection_state.data.shape[0] == num_groups


class Margins:
    """How clear every selection was: the score of the last position selected less that of the first one left out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[float] = []
        select = dsa.best_scored

        def watched(scores: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
            if scores.shape[-1] > top_k:
                edge = scores.topk(top_k + 1, dim=-1).values
                self.seen += (edge[..., -2] - edge[..., -1]).flatten().tolist()
            return select(scores, top_k)

        monkeypatch.setattr(dsa, "best_scored", watched)

    @property
    def num_unclear(self) -> int:
        """Selections that rounding may turn either way."""
        return sum(margin < 2e-6 for margin in self.seen)


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers_over_many_steps(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty-four steps of a batch of mixed lengths; one row may differ for each selection that rounding can turn."""
    margins = Margins(monkeypatch)
    loaded = tiny(tmp_path, name)
    record = Record()
    engine = garbage_engine(loaded, replace(TIGHT, max_running_requests=4), [n + 70 for n in LENGTHS], [record])
    requests = [engine.submit(prompt_of(length), SamplingParams(max_tokens=65)) for length in LENGTHS]
    engine.run()
    assert_clean(engine)
    oracle = their_model(tmp_path / name)
    errors = torch.cat(
        [
            (torch.stack(record.logits[request.id]) - their_logits(oracle, request)).abs().amax(dim=1)
            for request in requests
        ]
    )
    assert len(errors) == 65 * len(LENGTHS)
    assert int((errors > 1e-4).sum()) <= margins.num_unclear
    assert margins.num_unclear < 10


def test_an_index_reads_no_more_than_its_model_was_trained_to(tmp_path: Path) -> None:
    loaded = tiny(tmp_path, "deepseek-v3.2")
    assert build_family(HiSparseConfig(top_k=4096), loaded.model).top_k == TOP_K
    assert build_family(HiSparseConfig(top_k=20), loaded.model).top_k == 20


@pytest.mark.parametrize("selector", ["quest", "all"])
def test_selectors_of_other_models_are_refused(selector: str, tmp_path: Path) -> None:
    loaded = tiny(tmp_path, "deepseek-v3.2")
    with pytest.raises(ValueError, match=rf"selector must be 'auto' or 'dsa' for a DeepseekV32.*got '{selector}'"):
        build_family(HiSparseConfig(selector=selector), loaded.model)


@pytest.mark.parametrize("length", [20, 100])
def test_an_indexer_that_makes_nan_is_an_error_and_not_an_answer(length: int, tmp_path: Path) -> None:
    loaded = tiny(tmp_path, "deepseek-v3.2")
    assert isinstance(loaded.model, SparseMla)
    indexer = loaded.model.layers[1].indexer
    assert indexer is not None
    indexer.key_norm.fill_(torch.nan)
    engine = build_engine(loaded, TIGHT, [200])
    engine.submit(prompt_of(length), SamplingParams(max_tokens=40))
    with pytest.raises(ModelOutputError, match="the indexer's scores are NaN or infinite: the checkpoint is damaged"):
        engine.run()
