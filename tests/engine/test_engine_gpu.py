"""The engine on a GPU, steps recorded or not: hierarchical equals resident bit for bit, and load changes nothing."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hisparse.checkpoint import Loaded, load
from hisparse.checkpoint.tiny import write_tiny
from hisparse.checkpoint.tiny_mla import write_tiny_mla
from hisparse.config import HiSparseConfig
from hisparse.engine import SamplingParams, build_engine
from tests.engine.engines import VerifiedRun, assert_clean, prompt_of

pytestmark = pytest.mark.gpu

TOP_K = 64
# Attention and indexer as published models have them, so that their kernels run; everything else stays tiny.
PUBLISHED: dict[str, Any] = {
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64, "num_attention_heads": 8,
    "num_key_value_heads": 8, "index_n_heads": 16, "index_head_dim": 128, "q_lora_rank": 128, "hidden_size": 128,
}  # fmt: skip
LENGTHS = (300, 20, 131, 64, 700)
TIGHT = HiSparseConfig(top_k=TOP_K, device_buffer_size=TOP_K + 16, max_running_requests=3, prefill_chunk=100)


def latent(folder: Path, name: str, changes: dict[str, Any] | None = None) -> Loaded:
    path = write_tiny_mla(folder / name, name, top_k=TOP_K, changes=changes)
    return replace(load(path, dtype=torch.bfloat16, device="cuda"), stop_token_ids=())


def grouped(folder: Path, architecture: str) -> Loaded:
    path = write_tiny(folder / architecture, architecture, max_positions=4096)
    return replace(load(path, dtype=torch.bfloat16, device="cuda"), stop_token_ids=())


def run_and_compare(loaded: Loaded, config: HiSparseConfig, *, recorded: bool) -> None:
    run = VerifiedRun(loaded, config, [length + 40 for length in LENGTHS])
    for length in LENGTHS:
        run.submit(length, max_tokens=30)
    turns = 0
    while not run.engine.scheduler.is_idle:
        run.step(4)
        turns += 1
        running = [request for request in run.engine.scheduler.running if request.output]
        if running and turns % 3 == 0:
            run.engine.retract(running[0])
    run.finish()
    assert bool(run.engine.runner._recorded) == recorded


@pytest.mark.parametrize("cuda_graph", [True, False])
@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("shapes", ["published", "tiny"])
@pytest.mark.parametrize("name", ["deepseek-v3.2", "glm-5.2"])
def test_latent_models(name: str, shapes: str, prefetch: bool, cuda_graph: bool, tmp_path: Path) -> None:
    loaded = latent(tmp_path, name, PUBLISHED if shapes == "published" else None)
    run_and_compare(loaded, replace(TIGHT, prefetch=prefetch, cuda_graph=cuda_graph), recorded=cuda_graph)


@pytest.mark.parametrize(("records", "keys"), [("fp8", "auto"), ("auto", "fp8"), ("fp8", "fp8")])
def test_fp8(records: str, keys: str, tmp_path: Path) -> None:
    config = replace(TIGHT, kv_cache_dtype=records, index_cache_dtype=keys)
    run_and_compare(latent(tmp_path, "glm-5.2", PUBLISHED), config, recorded=True)


@pytest.mark.parametrize("kind", ["glm-5.2", "Qwen3ForCausalLM"])
def test_ranks_and_heat(kind: str, tmp_path: Path) -> None:
    loaded = grouped(tmp_path, kind) if kind.startswith("Qwen3") else latent(tmp_path, kind, PUBLISHED)
    run_and_compare(loaded, replace(TIGHT, policy="two_rate_tier"), recorded=True)


@pytest.mark.parametrize("cuda_graph", [True, False])
@pytest.mark.parametrize("per_kv_head", [True, False])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_grouped_models(architecture: str, per_kv_head: bool, cuda_graph: bool, tmp_path: Path) -> None:
    config = replace(TIGHT, quest_per_kv_head=per_kv_head, cuda_graph=cuda_graph)
    run_and_compare(grouped(tmp_path, architecture), config, recorded=cuda_graph)


@pytest.mark.parametrize(("kind", "num_requests"), [("glm-5.2", 200), ("Qwen3ForCausalLM", 60)])
def test_load_changes_nothing(kind: str, num_requests: int, tmp_path: Path) -> None:
    """Requests together, some retracted now and then, and each alone, in one bucket: the same tokens."""
    loaded = grouped(tmp_path, kind) if kind.startswith("Qwen3") else latent(tmp_path, kind, PUBLISHED)
    config = replace(TIGHT, max_running_requests=8)
    lengths = [20 + 37 * i % 400 for i in range(num_requests)]
    params = SamplingParams(max_tokens=12, temperature=0.0)
    engine = build_engine(loaded, config, [450] * num_requests)
    engine.scheduler.buckets = (8,)
    together = [engine.submit(prompt_of(length, seed=i), params) for i, length in enumerate(lengths)]
    steps = 0
    while not engine.scheduler.is_idle:
        engine.step()
        steps += 1
        decoding = [request for request in engine.scheduler.running if request.output]
        if decoding and steps % 7 == 0:
            engine.retract(decoding[-1])
    for i, length in enumerate(lengths):
        alone = engine.submit(prompt_of(length, seed=i), params)
        engine.run()
        assert alone.output == together[i].output
    assert_clean(engine)
