"""The tensors of a decoder with sparse latent attention: what a checkpoint must hold, and what is made of them.

`checkpoint` compares files with `weight_shapes`; `sparse_mla.py` builds its layers with `take_layer`. Two things
are rearranged here, once, so that no step pays for them. The up-projection of latents is split, by head, into
the part that is absorbed into queries and the part that turns attended latents into values. And where rope
pairs neighbouring dimensions, the rows that make these dimensions are sorted (first of each pair, then second),
which makes it the half-split rope that all models here use; scores are the same in any order.
"""

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hisparse.models.llama import Projection
from hisparse.models.routed_experts import GatedMlp, RoutedExperts
from hisparse.models.sparse_mla_config import SparseMlaConfig

Weights = MutableMapping[str, Tensor]


@dataclass(frozen=True)
class Indexer:
    """The weights of one layer's indexer. Its rope part comes first in a head."""

    query: Tensor  # [num_index_heads * index_head_dim, q_lora_rank]
    key: Tensor  # [index_head_dim, hidden]
    key_norm: Tensor  # [index_head_dim]
    key_norm_bias: Tensor  # [index_head_dim]
    head_weights: Tensor  # [num_index_heads, hidden] float32, times every constant of the score


@dataclass(frozen=True)
class Layer:
    """The weights of one layer."""

    attention_norm: Tensor  # [hidden]
    down: Projection  # hidden -> q_lora_rank + kv_lora_rank + qk_rope_head_dim
    query_norm: Tensor  # [q_lora_rank]
    latent_norm: Tensor  # [kv_lora_rank]
    indexer: Indexer | None  # None: the layer uses its anchor's selection
    query_up: Tensor  # [num_heads * qk_head_dim, q_lora_rank]
    absorb: Tensor  # [num_heads, qk_nope_head_dim, kv_lora_rank], a query's plain part -> latent
    value_up: Tensor  # [num_heads, kv_lora_rank, v_head_dim], an attended latent -> value
    output: Projection  # num_heads * v_head_dim -> hidden
    mlp_norm: Tensor  # [hidden]
    mlp: GatedMlp | RoutedExperts


class Target(NamedTuple):
    """Where weights go."""

    dtype: torch.dtype
    device: torch.device

    def take(self, weights: Weights, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Take one tensor out of `weights`."""
        return weights.pop(name).to(device=self.device, dtype=dtype or self.dtype)


def weight_shapes(config: SparseMlaConfig) -> dict[str, tuple[int, ...]]:
    """The name, as in published checkpoints, and the shape of every tensor that the model needs."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tied_head:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        own = _attention_shapes(config) | _mlp_shapes(config, layer)
        if config.has_indexer[layer]:
            own |= _indexer_shapes(config)
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    return shapes


def _attention_shapes(config: SparseMlaConfig) -> dict[str, tuple[int, ...]]:
    hidden, heads = config.hidden_size, config.num_heads
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_a_proj.weight": (config.q_lora_rank, hidden),
        "self_attn.q_a_layernorm.weight": (config.q_lora_rank,),
        "self_attn.q_b_proj.weight": (heads * config.qk_head_dim, config.q_lora_rank),
        "self_attn.kv_a_proj_with_mqa.weight": (config.record_dim, hidden),
        "self_attn.kv_a_layernorm.weight": (config.kv_lora_rank,),
        "self_attn.kv_b_proj.weight": (heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank),
        "self_attn.o_proj.weight": (hidden, heads * config.v_head_dim),
    }
    if config.attention_bias:
        shapes |= {
            "self_attn.q_a_proj.bias": (config.q_lora_rank,),
            "self_attn.kv_a_proj_with_mqa.bias": (config.record_dim,),
            "self_attn.o_proj.bias": (hidden,),
        }
    return shapes


def _indexer_shapes(config: SparseMlaConfig) -> dict[str, tuple[int, ...]]:
    return {
        "self_attn.indexer.wq_b.weight": (config.num_index_heads * config.index_head_dim, config.q_lora_rank),
        "self_attn.indexer.wk.weight": (config.index_head_dim, config.hidden_size),
        "self_attn.indexer.k_norm.weight": (config.index_head_dim,),
        "self_attn.indexer.k_norm.bias": (config.index_head_dim,),
        "self_attn.indexer.weights_proj.weight": (config.num_index_heads, config.hidden_size),
    }


def _mlp_shapes(config: SparseMlaConfig, layer: int) -> dict[str, tuple[int, ...]]:
    if not config.has_experts[layer]:
        return _gated_shapes("mlp", config.intermediate_size, config.hidden_size)
    experts = config.experts
    shapes = _gated_shapes("mlp.shared_experts", experts.shared_size, config.hidden_size) | {
        "mlp.gate.weight": (experts.num_experts, config.hidden_size),
        "mlp.gate.e_score_correction_bias": (experts.num_experts,),
    }
    for expert in range(experts.num_experts):
        shapes |= _gated_shapes(f"mlp.experts.{expert}", experts.expert_size, config.hidden_size)
    return shapes


def _gated_shapes(prefix: str, inner: int, hidden: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (inner, hidden),
        f"{prefix}.up_proj.weight": (inner, hidden),
        f"{prefix}.down_proj.weight": (hidden, inner),
    }


def take_layer(weights: Weights, config: SparseMlaConfig, index: int, target: Target) -> Layer:
    """Take one layer's tensors out of `weights`, in the naming of `weight_shapes`."""
    prefix = f"model.layers.{index}"
    attention = f"{prefix}.self_attn"
    absorb, value_up = _take_latent_up(weights, config, attention, target)
    return Layer(
        attention_norm=target.take(weights, f"{prefix}.input_layernorm.weight"),
        down=_take_down(weights, config, attention, target),
        query_norm=target.take(weights, f"{attention}.q_a_layernorm.weight"),
        latent_norm=target.take(weights, f"{attention}.kv_a_layernorm.weight"),
        indexer=_take_indexer(weights, config, f"{attention}.indexer", target) if config.has_indexer[index] else None,
        query_up=_take_query_up(weights, config, attention, target),
        absorb=absorb,
        value_up=value_up,
        output=Projection(
            target.take(weights, f"{attention}.o_proj.weight"),
            target.take(weights, f"{attention}.o_proj.bias") if config.attention_bias else None,
        ),
        mlp_norm=target.take(weights, f"{prefix}.post_attention_layernorm.weight"),
        mlp=_take_mlp(weights, config, f"{prefix}.mlp", target, routed=config.has_experts[index]),
    )


def _take_down(weights: Weights, config: SparseMlaConfig, prefix: str, target: Target) -> Projection:
    """Both down-projections as one, with the rope rows of the key sorted."""

    def take(suffix: str) -> Tensor:
        query = target.take(weights, f"{prefix}.q_a_proj.{suffix}")
        key = target.take(weights, f"{prefix}.kv_a_proj_with_mqa.{suffix}")
        return torch.cat((query, key[: config.kv_lora_rank], _sort_pairs(key[config.kv_lora_rank :])))

    return Projection(take("weight"), take("bias") if config.attention_bias else None)


def _take_query_up(weights: Weights, config: SparseMlaConfig, prefix: str, target: Target) -> Tensor:
    weight = target.take(weights, f"{prefix}.q_b_proj.weight")
    heads = weight.view(config.num_heads, config.qk_head_dim, -1).unbind()
    plain = config.qk_nope_head_dim
    return torch.cat([part for head in heads for part in (head[:plain], _sort_pairs(head[plain:]))])


def _take_latent_up(weights: Weights, config: SparseMlaConfig, prefix: str, target: Target) -> tuple[Tensor, Tensor]:
    weight = target.take(weights, f"{prefix}.kv_b_proj.weight")
    heads = weight.view(config.num_heads, -1, config.kv_lora_rank)  # [heads, qk_nope + v, kv_lora]
    absorb, value_up = heads.split((config.qk_nope_head_dim, config.v_head_dim), dim=1)
    return absorb.contiguous(), value_up.transpose(1, 2).contiguous()


def _take_indexer(weights: Weights, config: SparseMlaConfig, prefix: str, target: Target) -> Indexer:
    rotated = config.qk_rope_head_dim

    def arrange(rows: Tensor) -> Tensor:
        if not config.index_rope_interleaved:
            return rows
        return torch.cat((_sort_pairs(rows[:rotated]), rows[rotated:]))

    heads = target.take(weights, f"{prefix}.wq_b.weight").view(config.num_index_heads, config.index_head_dim, -1)
    constants = config.index_head_dim**-0.5 * config.num_index_heads**-0.5
    return Indexer(
        query=torch.cat([arrange(head) for head in heads.unbind()]),
        key=arrange(target.take(weights, f"{prefix}.wk.weight")),
        key_norm=arrange(target.take(weights, f"{prefix}.k_norm.weight")),
        key_norm_bias=arrange(target.take(weights, f"{prefix}.k_norm.bias")),
        head_weights=target.take(weights, f"{prefix}.weights_proj.weight", torch.float32) * constants,
    )


def _take_mlp(
    weights: Weights, config: SparseMlaConfig, prefix: str, target: Target, *, routed: bool
) -> GatedMlp | RoutedExperts:
    if not routed:
        return _take_gated(weights, prefix, target)
    experts = [_take_gated(weights, f"{prefix}.experts.{i}", target) for i in range(config.experts.num_experts)]
    return RoutedExperts(
        config=config.experts,
        router=target.take(weights, f"{prefix}.gate.weight", torch.float32),
        balance=target.take(weights, f"{prefix}.gate.e_score_correction_bias", torch.float32),
        gate_up=torch.stack([expert.gate_up for expert in experts]),
        down=torch.stack([expert.down for expert in experts]),
        shared=_take_gated(weights, f"{prefix}.shared_experts", target),
    )


def _take_gated(weights: Weights, prefix: str, target: Target) -> GatedMlp:
    gate, up, down = (target.take(weights, f"{prefix}.{name}_proj.weight") for name in ("gate", "up", "down"))
    return GatedMlp(torch.cat((gate, up)), down)


def _sort_pairs(rows: Tensor) -> Tensor:
    """Rows 0, 2, 4, ... and then 1, 3, 5, ...: pairs of neighbours become pairs half the length apart."""
    return torch.cat((rows[0::2], rows[1::2]))
