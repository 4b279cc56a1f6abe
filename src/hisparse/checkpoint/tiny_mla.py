"""Writes tiny random checkpoints of DeepSeek-V3.2 and GLM-5.x, in every notation that their files come in.

The counterpart of `tiny.py` for models with sparse latent attention; `hisparse make-tiny` and tests call
`write_tiny_mla`. Sizes are small, but nothing is left out: dense and routed layers, expert groups, yarn, shared
indexers, FP8. There are sixteen indexer heads: with few of them ReLU makes so many scores exactly zero that
selections are a matter of tie rules.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from hisparse.checkpoint.fp8 import SCALE_SUFFIX, quantise
from hisparse.checkpoint.tiny import END_OF_TURN, VOCAB_SIZE, random_tensors, write_checkpoint
from hisparse.models.anchors import layers_with_indexer
from hisparse.models.sparse_mla_config import SparseMlaConfig
from hisparse.models.sparse_mla_weights import weight_shapes

FP8_BLOCK = (32, 32)  # smaller than published, so that tiny matrices have several
NEVER_QUANTISED = ("norm", "mlp.gate.", "weights_proj", "embed_tokens", "lm_head")
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 40,
    "index_n_heads": 16,
    "index_head_dim": 32,
    "max_position_embeddings": 4096,
    "vocab_size": VOCAB_SIZE,
    "eos_token_id": END_OF_TURN,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
}
DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "num_hidden_layers": 4,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
GLM: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 4,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "rope_interleave": True,
    "indexer_rope_interleave": True,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek-v3.2": DEEPSEEK,
    "glm-5.1": GLM,
    "glm-5.2": GLM | {"num_hidden_layers": 8},
}
SHARED_INDEXERS = ("glm-5.2",)
FREQUENCY: dict[str, Any] = {"index_topk_freq": 4, "index_skip_topk_offset": 3}  # as published: F F F S S S F S


def write_tiny_mla(
    folder: Path,
    name: str,
    *,
    seed: int = 0,
    top_k: int = 64,
    notation: str = "types",  # of shared indexers, where the family has them; one of NOTATIONS
    fp8: bool = False,
    packed_experts: bool = False,
    sharded: bool = False,
    changes: dict[str, Any] | None = None,  # to config.json, over everything else
) -> Path:
    """Write a random float32 or FP8 checkpoint with its tokenizer into `folder`, and return `folder`.

    Raises `ValueError` for a name or a notation that is not known, `CheckpointError` for changes that cannot be
    loaded either.
    """
    config = SIZES | _family(name) | {"index_topk": top_k} | (changes or {})
    if name in SHARED_INDEXERS:
        config = config | _notation(notation, config["num_hidden_layers"]) | (changes or {})
    if fp8:
        config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(FP8_BLOCK)}
    tensors = random_tensors(weight_shapes(SparseMlaConfig.from_dict(config)), seed)
    if packed_experts:
        tensors = pack_experts(tensors, config["n_routed_experts"])
    if fp8:
        tensors = _quantised(tensors)
    return write_checkpoint(folder, config, tensors, sharded)


def pack_experts(tensors: dict[str, Tensor], num_experts: int) -> dict[str, Tensor]:
    """The same tensors with each layer's experts in one, as transformers holds them in memory."""
    import torch

    first = ".experts.0.gate_proj.weight"
    packed = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for prefix in [name.removesuffix(first) for name in tensors if name.endswith(first)]:
        experts = [f"{prefix}.experts.{expert}" for expert in range(num_experts)]
        gate, up, down = (
            torch.stack([tensors[f"{expert}.{kind}_proj.weight"] for expert in experts])
            for kind in ("gate", "up", "down")
        )
        packed |= {f"{prefix}.experts.gate_up_proj": torch.cat((gate, up), 1), f"{prefix}.experts.down_proj": down}
    return packed


def _family(name: str) -> dict[str, Any]:
    if name not in FAMILIES:
        raise ValueError(f"tiny checkpoint: expected one of {', '.join(FAMILIES)}, got {name!r}")
    return FAMILIES[name]


def _notation(notation: str, num_layers: int) -> dict[str, Any]:
    if notation not in NOTATIONS:
        raise ValueError(f"indexer notation: expected one of {', '.join(NOTATIONS)}, got {notation!r}")
    return NOTATIONS[notation](layers_with_indexer(FREQUENCY, num_layers))


def _quantised(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    stored = {}
    for name, tensor in tensors.items():
        if tensor.dim() < 2 or any(part in name for part in NEVER_QUANTISED):
            stored[name] = tensor
        else:
            stored[name], stored[name + SCALE_SUFFIX] = quantise(tensor, FP8_BLOCK)
    return stored


NOTATIONS: dict[str, Callable[[tuple[bool, ...]], dict[str, Any]]] = {
    "types": lambda layers: {"indexer_types": ["full" if own else "shared" for own in layers]},
    "pattern": lambda layers: {"index_topk_pattern": "".join("F" if own else "S" for own in layers)},
    "pattern-list": lambda layers: {"index_topk_pattern": ["full" if own else "shared" for own in layers]},
    "frequency": lambda layers: FREQUENCY,
}
