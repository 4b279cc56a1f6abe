"""The shape of a decoder with sparse latent attention, read from a checkpoint's config.json and checked.

DeepSeek-V3.2 and GLM-5, 5.1 and 5.2 are one decoder: multi-head latent attention, an indexer that selects
positions, routed experts. They differ in sizes, in the indexer's rope, and in which layers have an indexer.
`checkpoint` feeds `SparseMlaConfig.from_dict`; `sparse_mla.py` computes from it, and `sparse_mla_weights.py`
says which tensors it needs.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hisparse.errors import CheckpointError
from hisparse.models.anchors import anchors_of, layers_with_indexer
from hisparse.models.config_values import (
    MOST_LAYERS,
    Config,
    architecture_of,
    boolean,
    positive_float,
    positive_int,
    token_ids,
)
from hisparse.models.rope import RopeConfig, rope_table_name
from hisparse.models.routed_experts import ExpertsConfig

# Architecture -> whether its indexer's rope pairs neighbouring dimensions, where config.json does not say.
ARCHITECTURES = {"DeepseekV32ForCausalLM": False, "GlmMoeDsaForCausalLM": True}
MLP_TYPES = {"dense": False, "sparse": True}
ROPE_VARIANTS = ("default", "yarn")
MOST_EXPERTS = 250_000  # in all layers together: each has three matrices, whose names are written out
ONLY_VALUES: dict[str, object] = {
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "rope_interleave": True,
    "mlp_bias": False,
    "use_sliding_window": False,
}


@dataclass(frozen=True)
class SparseMlaConfig:
    """One checkpoint's shape. Sizes are in elements."""

    architecture: str
    num_layers: int
    num_heads: int
    hidden_size: int
    intermediate_size: int  # of the dense layers
    vocab_size: int
    max_positions: int
    rms_norm_eps: float
    tied_head: bool
    attention_bias: bool  # of the two down-projections and of the output
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    attention_scale: float  # multiplies query . key
    rope: RopeConfig  # of `qk_rope_head_dim` dimensions, in attention and indexer alike
    num_index_heads: int
    index_head_dim: int
    index_top_k: int
    index_rope_interleaved: bool
    has_indexer: tuple[bool, ...]  # a layer
    has_experts: tuple[bool, ...]  # a layer; the others are dense
    experts: ExpertsConfig
    num_mtp_layers: int  # layers for speculation that follow in the files, and are not read
    weight_block: tuple[int, int] | None  # rows and columns that share a scale where weights are FP8
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.qk_rope_head_dim % 2:
            raise CheckpointError(f"config.json: qk_rope_head_dim must be even, got {self.qk_rope_head_dim}")
        if self.index_head_dim < self.qk_rope_head_dim:
            raise CheckpointError(
                f"config.json: index_head_dim {self.index_head_dim} must be at least "
                f"qk_rope_head_dim {self.qk_rope_head_dim}, the dimensions of it that are rotated"
            )
        if self.num_layers * self.experts.num_experts > MOST_EXPERTS:
            raise CheckpointError(
                f"config.json: num_hidden_layers {self.num_layers:,} times n_routed_experts "
                f"{self.experts.num_experts:,} must be at most {MOST_EXPERTS:,}"
            )

    @cached_property
    def anchors(self) -> tuple[int, ...]:
        """For each layer, the layer whose selection it uses: itself, or an earlier one."""
        return anchors_of(self.has_indexer)

    @property
    def record_dim(self) -> int:
        """Elements of one position's record: the latent, then the rotated key part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Elements of one head's query before absorption."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @classmethod
    def from_dict(cls, config: Config) -> "SparseMlaConfig":
        """Read a config.json dictionary, as published or as transformers 5 writes it.

        Raises `CheckpointError` for an unsupported architecture or feature, and for wrong or missing values.
        """
        architecture = architecture_of(config, ARCHITECTURES)
        _refuse_unsupported(config)
        num_layers = positive_int(config, "num_hidden_layers", most=MOST_LAYERS)
        rope = _rope(config)
        return cls(
            architecture=architecture,
            num_layers=num_layers,
            num_heads=positive_int(config, "num_attention_heads"),
            hidden_size=positive_int(config, "hidden_size"),
            intermediate_size=positive_int(config, "intermediate_size"),
            vocab_size=positive_int(config, "vocab_size"),
            max_positions=positive_int(config, "max_position_embeddings"),
            rms_norm_eps=positive_float(config, "rms_norm_eps", 1e-6),
            tied_head=boolean(config, "tie_word_embeddings", False),
            attention_bias=boolean(config, "attention_bias", False),
            q_lora_rank=positive_int(config, "q_lora_rank"),
            kv_lora_rank=positive_int(config, "kv_lora_rank"),
            qk_nope_head_dim=positive_int(config, "qk_nope_head_dim"),
            qk_rope_head_dim=positive_int(config, "qk_rope_head_dim"),
            v_head_dim=positive_int(config, "v_head_dim"),
            attention_scale=_attention_scale(config, rope),
            rope=rope,
            num_index_heads=positive_int(config, "index_n_heads"),
            index_head_dim=positive_int(config, "index_head_dim"),
            index_top_k=positive_int(config, "index_topk"),
            index_rope_interleaved=boolean(config, "indexer_rope_interleave", ARCHITECTURES[architecture]),
            has_indexer=layers_with_indexer(config, num_layers),
            has_experts=_layers_with_experts(config, num_layers),
            experts=ExpertsConfig.from_dict(config),
            num_mtp_layers=_count(config, "num_nextn_predict_layers", 1),
            weight_block=_weight_block(config),
            eos_token_ids=token_ids(config, "eos_token_id"),
        )


def _refuse_unsupported(config: Config) -> None:
    for key, only in ONLY_VALUES.items():
        if config.get(key, only) not in (only, None):
            raise CheckpointError(f"config.json: {key} must be {only!r} or absent, got {config[key]!r}")
    layer_types = config.get("layer_types") or []
    if not isinstance(layer_types, list):
        raise CheckpointError(f"config.json: layer_types must be a list, got {layer_types!r}")
    if "sliding_attention" in layer_types:
        raise CheckpointError("config.json: layer_types has 'sliding_attention', which is not supported")
    num_heads = positive_int(config, "num_attention_heads")
    if config.get("num_key_value_heads", num_heads) not in (num_heads, None):
        raise CheckpointError(
            f"config.json: num_key_value_heads must be num_attention_heads ({num_heads}) in latent attention, "
            f"got {config['num_key_value_heads']!r}"
        )
    head_dim = positive_int(config, "qk_nope_head_dim") + positive_int(config, "qk_rope_head_dim")
    if config.get("qk_head_dim", head_dim) not in (head_dim, None):
        raise CheckpointError(
            f"config.json: qk_head_dim must be qk_nope_head_dim + qk_rope_head_dim ({head_dim}), "
            f"got {config['qk_head_dim']!r}"
        )


def _rope(config: Config) -> RopeConfig:
    """The rotation of `qk_rope_head_dim` dimensions, however the configuration expresses that these are a part."""
    plain: dict[str, Any] = {key: value for key, value in config.items() if key != "partial_rotary_factor"}
    _check_share(config, config.get("partial_rotary_factor"))
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(table := config.get(key), dict):
            _check_share(config, table.get("partial_rotary_factor"))
            plain[key] = {name: value for name, value in table.items() if name != "partial_rotary_factor"}
    table = plain.get(rope_table_name(plain)) or {}
    variant = table.get("rope_type", table.get("type", "default")) if isinstance(table, dict) else "default"
    if variant not in ROPE_VARIANTS:
        raise CheckpointError(
            f"config.json: rope type {variant!r} is not supported with latent attention; "
            f"supported: {', '.join(ROPE_VARIANTS)}"
        )
    return RopeConfig.from_dict(plain)


def _check_share(config: Config, share: object) -> None:
    """A share says how much of a head is rotated: all of the rope part, which is a part of the whole head."""
    rotated = positive_int(config, "qk_rope_head_dim")
    whole = rotated + positive_int(config, "qk_nope_head_dim")
    known = {1.0, rotated / whole, rotated / positive_int(config, "head_dim", rotated)}
    if share is None or (isinstance(share, int | float) and any(math.isclose(share, one) for one in known)):
        return
    raise CheckpointError(
        f"config.json: partial_rotary_factor must be 1 or qk_rope_head_dim over the head ({rotated / whole:g}), "
        f"got {share!r}"
    )


def _attention_scale(config: Config, rope: RopeConfig) -> float:
    """1 / sqrt of a head's query, times the square of yarn's scale where `mscale_all_dim` asks for it."""
    head_dim = positive_int(config, "qk_nope_head_dim") + positive_int(config, "qk_rope_head_dim")
    name = rope_table_name(config)
    weight = (config.get(name) or {}).get("mscale_all_dim")
    if rope.variant == "default" or not weight or rope.factor <= 1:
        return float(head_dim**-0.5)
    scale = 0.1 * positive_float(config, f"{name}.mscale_all_dim") * math.log(rope.factor) + 1.0
    return float(head_dim**-0.5 * scale * scale)


def _layers_with_experts(config: Config, num_layers: int) -> tuple[bool, ...]:
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        num_dense = _count(config, "first_k_dense_replace", 3)
        return tuple(layer >= num_dense for layer in range(num_layers))
    if not isinstance(kinds, list) or any(kind not in tuple(MLP_TYPES) for kind in kinds):
        raise CheckpointError(f"config.json: mlp_layer_types must be a list of 'dense' and 'sparse', got {kinds!r}")
    if len(kinds) != num_layers:
        raise CheckpointError(
            f"config.json: mlp_layer_types has {len(kinds)} layers, but num_hidden_layers is {num_layers}"
        )
    return tuple(MLP_TYPES[kind] for kind in kinds)


def _count(config: Config, key: str, default: int) -> int:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise CheckpointError(f"config.json: {key} must be a number of layers, 0 or more, got {value!r}")
    if value > MOST_LAYERS:
        raise CheckpointError(f"config.json: {key} must be at most {MOST_LAYERS:,}, got {value:,}")
    return value


def _weight_block(config: Config) -> tuple[int, int] | None:
    quantization = config.get("quantization_config")
    if not quantization:
        return None
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if method != "fp8" or not isinstance(quantization, dict):
        raise CheckpointError(
            f"config.json: quantization_config has quant_method {method!r}, which is not supported; "
            "use the FP8 block-scaled or the unquantized checkpoint"
        )
    if quantization.get("fmt", "e4m3") != "e4m3":
        raise CheckpointError(f"config.json: quantization_config: fmt must be 'e4m3', got {quantization['fmt']!r}")
    block = quantization.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise CheckpointError(
            "config.json: quantization_config: weight_block_size must be two positive integers, "
            f"such as [128, 128], got {block!r}; FP8 weights with one scale a tensor are not supported"
        )
    return block[0], block[1]
