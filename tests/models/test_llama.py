"""The decoder against transformers, on tiny random checkpoints that both read from the same files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hisparse.checkpoint.tiny import VOCAB_SIZE, write_tiny
from hisparse.models import Llama
from tests.models.loading import load_llama

LLAMA, QWEN2, QWEN3 = "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "llama": {"architecture": LLAMA},
    "llama tied": {"architecture": LLAMA, "tied": True},
    "llama biased": {"architecture": LLAMA, "attention_bias": True, "mlp_bias": True},
    "llama one kv head": {"architecture": LLAMA, "num_kv_heads": 1},
    "llama wide heads": {"architecture": LLAMA, "head_dim": 32, "num_kv_heads": 4},
    "llama linear": {"architecture": LLAMA, "rope": {"rope_type": "linear", "factor": 3.0}},
    "llama llama3": {"architecture": LLAMA, "rope": LLAMA3},
    "qwen2": {"architecture": QWEN2, "tied": True},
    "qwen2 yarn": {"architecture": QWEN2, "rope": YARN},
    "qwen2 yarn scaled": {"architecture": QWEN2, "rope": YARN | {"attention_factor": 0.7}},
    "qwen2 yarn mscale": {"architecture": QWEN2, "rope": YARN | {"mscale": 1.5, "mscale_all_dim": 0.8}},
    "qwen2 yarn smooth": {"architecture": QWEN2, "rope": YARN | {"truncate": False, "beta_fast": 16.0}},
    "qwen3": {"architecture": QWEN3},
    "qwen3 biased": {"architecture": QWEN3, "attention_bias": True, "rope": {"rope_theta": 1e6}},
}
NUM_TOKENS = 150


class DenseHistory:
    """Causal attention over everything that was handed in, each layer's keys and values in growing lists."""

    def __init__(self, num_layers: int) -> None:
        self.keys: list[list[Tensor]] = [[] for _ in range(num_layers)]
        self.values: list[list[Tensor]] = [[] for _ in range(num_layers)]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.keys[layer].append(key)
        self.values[layer].append(value)
        keys, values = torch.cat(self.keys[layer]), torch.cat(self.values[layer])
        num_new, num_all = len(query), len(keys)
        visible = torch.ones(num_new, num_all, dtype=torch.bool).tril(num_all - num_new)
        attended = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=visible,
            enable_gqa=True,
        )
        return attended[0].transpose(0, 1)


def dense_logits(model: Llama, tokens: Tensor, chunks: list[int]) -> Tensor:
    history = DenseHistory(model.config.num_layers)
    positions = torch.arange(len(tokens))
    pieces = zip(tokens.split(chunks), positions.split(chunks), strict=True)
    return torch.cat([model.logits(model.forward(part, where, history)) for part, where in pieces])


def transformers_logits(folder: Path, tokens: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits: Tensor = oracle(tokens[None]).logits[0]
    return logits


def random_tokens(count: int = NUM_TOKENS) -> Tensor:
    return torch.randint(VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, **CHECKPOINTS[name])
    tokens = random_tokens()
    ours = dense_logits(load_llama(folder), tokens, [len(tokens)])
    torch.testing.assert_close(ours, transformers_logits(folder, tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", [LLAMA, QWEN2, QWEN3])
@pytest.mark.parametrize("chunks", [[64, 86], [1, 149], [100, *[1] * 50]], ids=["even", "one first", "decode"])
def test_chunks_equal_one_pass(architecture: str, chunks: list[int], tmp_path: Path) -> None:
    model = load_llama(write_tiny(tmp_path, architecture))
    tokens = random_tokens()
    # Not bit for bit: a row of a CPU matrix product depends on how many rows there are.
    whole = dense_logits(model, tokens, [len(tokens)])
    torch.testing.assert_close(dense_logits(model, tokens, chunks), whole, atol=1e-4, rtol=1e-4)


def test_requests_of_one_batch_are_told_apart_by_positions(tmp_path: Path) -> None:
    """Two first tokens in one call, one at position 0 and one far away: rope must follow `positions`."""
    model = load_llama(write_tiny(tmp_path))
    rotated: list[Tensor] = []

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rotated.append(key)
        return query

    model.forward(torch.tensor([5, 5, 5]), torch.tensor([0, 900, 0]), attend)
    assert torch.equal(rotated[0][0], rotated[0][2])
    assert not torch.allclose(rotated[0][0], rotated[0][1])


def test_bfloat16_logits_are_float32_and_close(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path)
    tokens = random_tokens(32)
    model = load_llama(folder, dtype=torch.bfloat16)
    ours = dense_logits(model, tokens, [32])
    exact = dense_logits(load_llama(folder), tokens, [32])
    assert model.embedding.dtype == torch.bfloat16
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, exact, atol=0.15, rtol=0.1)  # eight bits of mantissa through two layers


def test_the_weights_are_not_held_twice(tmp_path: Path) -> None:
    from hisparse.checkpoint.folder import read_tensors

    model = load_llama(write_tiny(tmp_path))
    weights = read_tensors(tmp_path)
    Llama(model.config, weights)
    assert not weights


@pytest.mark.parametrize(
    ("tokens", "positions", "named"),
    [
        (torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int64), "tokens"),
        (torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 3, dtype=torch.int64), "tokens"),
        (torch.zeros(3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), "positions"),
        (torch.zeros(3, dtype=torch.int64), torch.zeros(3), "positions"),
    ],
    ids=["int32", "two dimensions", "fewer positions", "float positions"],
)
def test_forward_refuses_other_shapes(tokens: Tensor, positions: Tensor, named: str, tmp_path: Path) -> None:
    model = load_llama(write_tiny(tmp_path))
    with pytest.raises(ValueError, match=f"{named}: expected int64"):
        model.forward(tokens, positions, DenseHistory(2))
