"""The decoder with sparse latent attention against transformers, on tiny checkpoints that both read."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hisparse.checkpoint import load
from hisparse.checkpoint.folder import read_tensors
from hisparse.checkpoint.tiny import VOCAB_SIZE
from hisparse.checkpoint.tiny_mla import NOTATIONS, write_tiny_mla
from hisparse.models.attend_latent import IndexInputs
from hisparse.models.sparse_mla import SparseMla
from hisparse.models.sparse_mla_config import SparseMlaConfig
from tests.models.resident_latents import ResidentLatents, clear_tokens

YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 8.0, "original_max_position_embeddings": 512}
NOTATION_CASES: dict[str, dict[str, Any]] = {
    f"glm-5.2 {notation}": {"name": "glm-5.2", "notation": notation} for notation in NOTATIONS
}
CHECKPOINTS: dict[str, dict[str, Any]] = NOTATION_CASES | {
    "deepseek": {"name": "deepseek-v3.2"},
    "deepseek default rope": {
        "name": "deepseek-v3.2",
        "changes": {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}},
    },
    "deepseek yarn, attention scaled": {
        "name": "deepseek-v3.2",
        "changes": {"rope_scaling": None, "rope_parameters": YARN | {"mscale_all_dim": 0.7}},
    },
    "deepseek yarn, both scales": {
        "name": "deepseek-v3.2",
        "changes": {"rope_scaling": None, "rope_parameters": YARN | {"mscale": 1.4, "mscale_all_dim": 0.7}},
    },
    "deepseek yarn, no scale": {"name": "deepseek-v3.2", "changes": {"rope_scaling": None, "rope_parameters": YARN}},
    "deepseek, one group of four": {"name": "deepseek-v3.2", "changes": {"topk_group": 1, "num_experts_per_tok": 2}},
    "deepseek, weights not normalised": {"name": "deepseek-v3.2", "changes": {"norm_topk_prob": False}},
    "deepseek, biased": {"name": "deepseek-v3.2", "changes": {"attention_bias": True}},
    "deepseek, all dense": {"name": "deepseek-v3.2", "changes": {"first_k_dense_replace": 4}},
    "glm-5.1": {"name": "glm-5.1"},
    "glm-5.1 yarn": {"name": "glm-5.1", "changes": {"rope_parameters": YARN | {"mscale_all_dim": 1.0}}},
    "glm-5.1 grouped": {"name": "glm-5.1", "changes": {"n_group": 2, "topk_group": 1}},
    "glm-5.1, norms of another eps": {"name": "glm-5.1", "changes": {"rms_norm_eps": 0.05}},
    "glm-5.1 tied, two shared experts": {
        "name": "glm-5.1",
        "changes": {"tie_word_embeddings": True, "n_shared_experts": 2},
    },
    "glm-5.1, routed first": {"name": "glm-5.1", "changes": {"mlp_layer_types": ["sparse", "dense"] * 2}},
    "glm-5.1, packed experts": {"name": "glm-5.1", "packed_experts": True},
    "glm-5.2 sharded": {"name": "glm-5.2", "sharded": True},
}
NUM_TOKENS, NUM_DECODES, TOP_K = 100, 8, 40


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Products this small only wait for each other in several threads, and badly so beside other processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def sparse_logits(model: SparseMla, tokens: Tensor, chunks: list[int], top_k: int | None = None) -> Tensor:
    attention = ResidentLatents(model.config, top_k)
    pieces = zip(tokens.split(chunks), torch.arange(len(tokens)).split(chunks), strict=True)
    return torch.cat([model.logits(model.forward(part, where, attention)) for part, where in pieces])


def transformers_logits(folder: Path, tokens: Tensor, num_decodes: int = 0) -> Tensor:
    """Prefill in one pass, and then one token after the other on its cache."""
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    prompt, *rest = tokens.split([len(tokens) - num_decodes, *[1] * num_decodes])
    with torch.no_grad():
        out = oracle(prompt[None], use_cache=True)
        logits = [out.logits[0]]
        for token in rest:
            held = "cache" if "cache" in out else "past_key_values"  # renamed in transformers 5.24
            out = oracle(token[None], use_cache=True, **{held: out[held]})
            logits.append(out.logits[0])
    return torch.cat(logits)


def load_mla(folder: Path, dtype: torch.dtype = torch.float32) -> SparseMla:
    model = load(folder, dtype=dtype).model
    assert isinstance(model, SparseMla)
    return model


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    folder = write_tiny_mla(tmp_path, top_k=TOP_K, **CHECKPOINTS[name])
    model = load_mla(folder)
    tokens = clear_tokens(model, NUM_TOKENS)
    ours = sparse_logits(model, tokens, [NUM_TOKENS - NUM_DECODES, *[1] * NUM_DECODES])
    theirs = transformers_logits(folder, tokens, NUM_DECODES)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    dense = sparse_logits(model, tokens, [NUM_TOKENS], top_k=NUM_TOKENS)
    assert (dense - theirs)[TOP_K:].abs().max() > 0.1  # so the selection is being tested


@pytest.mark.parametrize("name", ["deepseek-v3.2", "glm-5.1", "glm-5.2"])
@pytest.mark.parametrize("chunks", [[64, 36], [1, 99], [60, *[1] * 40]], ids=["even", "one first", "decode"])
def test_chunks_equal_one_pass(name: str, chunks: list[int], tmp_path: Path) -> None:
    model = load_mla(write_tiny_mla(tmp_path, name, top_k=TOP_K))
    tokens = clear_tokens(model, NUM_TOKENS)
    # Not bit for bit: a row of a CPU matrix product depends on how many rows there are.
    whole = sparse_logits(model, tokens, [NUM_TOKENS])
    torch.testing.assert_close(sparse_logits(model, tokens, chunks), whole, atol=1e-4, rtol=1e-4)


def test_below_top_k_it_is_dense(tmp_path: Path) -> None:
    model = load_mla(write_tiny_mla(tmp_path, "glm-5.2", top_k=TOP_K))
    tokens = clear_tokens(model, TOP_K)
    whole = sparse_logits(model, tokens, [TOP_K], top_k=10_000)
    assert torch.equal(sparse_logits(model, tokens, [TOP_K]), whole)


class Order:
    """Writes down what is called, and what with."""

    def __init__(self, config: SparseMlaConfig) -> None:
        self.config = config
        self.calls: list[tuple[str, int]] = []
        self.inputs: dict[int, tuple[Tensor, IndexInputs | None]] = {}

    def begin(self, layer: int, latent: Tensor, index: IndexInputs | None) -> None:
        self.calls.append(("begin", layer))
        self.inputs[layer] = latent, index

    def attend(self, layer: int, query: Tensor) -> Tensor:
        self.calls.append(("attend", layer))
        assert query.shape[1:] == (self.config.num_heads, self.config.record_dim)
        return query[..., : self.config.kv_lora_rank]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_layer_begins_and_then_attends(dtype: torch.dtype, tmp_path: Path) -> None:
    model = load_mla(write_tiny_mla(tmp_path, "glm-5.2"), dtype)
    config, order = model.config, Order(model.config)
    hidden = model.forward(torch.tensor([5, 6, 7]), torch.arange(3), order)
    assert order.calls == [(call, layer) for layer in range(8) for call in ("begin", "attend")]
    assert hidden.dtype == dtype
    assert model.logits(hidden).dtype == torch.float32
    assert [layer for layer, (_, index) in order.inputs.items() if index is not None] == [0, 1, 2, 6]
    latent, index = order.inputs[6]
    assert index is not None
    assert latent.shape == (3, config.record_dim)
    assert index.query.shape == (3, config.num_index_heads, config.index_head_dim)
    assert index.key.shape == (3, config.index_head_dim)
    assert index.weights.shape == (3, config.num_index_heads)
    assert (latent.dtype, index.query.dtype, index.key.dtype) == (dtype,) * 3
    assert index.weights.dtype == torch.float32


def test_requests_of_one_batch_are_told_apart_by_positions(tmp_path: Path) -> None:
    """Two first tokens in one call, one at position 0 and one far away: rope must follow `positions`."""
    model = load_mla(write_tiny_mla(tmp_path, "deepseek-v3.2"))
    order = Order(model.config)
    model.forward(torch.tensor([5, 5, 5]), torch.tensor([0, 900, 0]), order)
    latent, index = order.inputs[0]
    assert index is not None
    plain = model.config.kv_lora_rank
    for vectors in (latent[:, plain:], index.key, index.query):
        assert torch.equal(vectors[0], vectors[2])
        assert not torch.allclose(vectors[0], vectors[1])
    assert torch.equal(latent[0, :plain], latent[1, :plain])


def test_bfloat16_is_close_where_everything_is_selected(tmp_path: Path) -> None:
    folder = write_tiny_mla(tmp_path, "deepseek-v3.2", changes={"first_k_dense_replace": 4})
    tokens = torch.randint(VOCAB_SIZE, (32,), generator=torch.Generator().manual_seed(1))
    ours = sparse_logits(load_mla(folder, torch.bfloat16), tokens, [32])
    exact = sparse_logits(load_mla(folder), tokens, [32])
    torch.testing.assert_close(ours, exact, atol=0.2, rtol=0.1)  # eight bits of mantissa through four layers


def test_saved_by_transformers_and_loaded_here(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    ours = write_tiny_mla(tmp_path / "ours", "glm-5.2", top_k=TOP_K, notation="frequency")
    AutoModelForCausalLM.from_pretrained(ours, dtype=torch.float32).save_pretrained(tmp_path / "theirs")
    for file in ours.glob("tokenizer*"):
        (tmp_path / "theirs" / file.name).write_bytes(file.read_bytes())
    model = load_mla(tmp_path / "theirs")
    tokens = clear_tokens(model, NUM_TOKENS)
    whole = sparse_logits(load_mla(ours), tokens, [NUM_TOKENS])
    assert torch.equal(sparse_logits(model, tokens, [NUM_TOKENS]), whole)


@pytest.mark.parametrize("name", ["deepseek-v3.2", "glm-5.2"])
def test_packed_experts_are_the_same_model(name: str, tmp_path: Path) -> None:
    tokens = torch.arange(NUM_TOKENS)
    plain, packed = (
        load_mla(write_tiny_mla(tmp_path / str(packed), name, packed_experts=packed)) for packed in (False, True)
    )
    assert torch.equal(sparse_logits(packed, tokens, [NUM_TOKENS]), sparse_logits(plain, tokens, [NUM_TOKENS]))


def test_the_weights_are_not_held_twice(tmp_path: Path) -> None:
    model = load_mla(write_tiny_mla(tmp_path, "glm-5.2"))
    weights = read_tensors(tmp_path)
    SparseMla(model.config, weights)
    assert not weights


@pytest.mark.parametrize(
    ("tokens", "positions", "named"),
    [
        (torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int64), "tokens"),
        (torch.zeros(3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), "positions"),
    ],
    ids=["int32", "fewer positions"],
)
def test_forward_refuses_other_shapes(tokens: Tensor, positions: Tensor, named: str, tmp_path: Path) -> None:
    model = load_mla(write_tiny_mla(tmp_path, "glm-5.1"))
    with pytest.raises(ValueError, match=f"{named}: expected int64"):
        model.forward(tokens, positions, ResidentLatents(model.config))
