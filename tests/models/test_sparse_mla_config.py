"""What config.json may say, as published and as saved by transformers, and what is refused."""

import math
from typing import Any

import pytest
from transformers import DeepseekV32Config, GlmMoeDsaConfig

from hisparse.errors import CheckpointError
from hisparse.models.sparse_mla_config import SparseMlaConfig
from hisparse.models.sparse_mla_weights import weight_shapes

FP8: dict[str, Any] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "attention_bias": False,
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": FP8 | {"scale_fmt": "ue8m0"},
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
GLM: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "attention_bias": False,
    "eos_token_id": [154820, 154827, 154829],
    "first_k_dense_replace": 3,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 6144,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "indexer_rope_interleave": True,
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 78,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 2048,
    "qk_head_dim": 256,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 154880,
}
OWN = (0, 1, 2, *range(6, 78, 4))  # FACTS: 21 layers
TYPES = ["full" if layer in OWN else "shared" for layer in range(78)]
FREQUENCY: dict[str, Any] = {"index_topk_freq": 4, "index_skip_topk_offset": 3}
GLM52 = GLM | FREQUENCY | {"indexer_types": TYPES, "index_topk_pattern": None, "head_dim": 192}
NOTATIONS: dict[str, dict[str, Any]] = {
    "indexer_types": {"indexer_types": TYPES},
    "indexer_types, one letter": {"indexer_types": ["F" if layer in OWN else "S" for layer in range(78)]},
    "pattern": {"index_topk_pattern": "".join("F" if layer in OWN else "S" for layer in range(78))},
    "pattern of letters": {"index_topk_pattern": ["F" if layer in OWN else "S" for layer in range(78)]},
    "pattern of words": {"index_topk_pattern": TYPES},
    "frequency": FREQUENCY,
    "all of them": FREQUENCY | {"indexer_types": TYPES, "index_topk_pattern": TYPES},
}


def test_deepseek_as_published() -> None:
    config = SparseMlaConfig.from_dict(DEEPSEEK)
    assert (config.num_layers, config.record_dim, config.qk_head_dim) == (61, 576, 192)
    assert (config.num_index_heads, config.index_head_dim, config.index_top_k) == (64, 128, 2048)
    assert not config.index_rope_interleaved
    assert config.anchors == tuple(range(61))
    assert config.has_experts == (False,) * 3 + (True,) * 58
    assert (config.experts.num_groups, config.experts.num_chosen_groups, config.experts.scale) == (8, 4, 2.5)
    assert config.rope.variant == "yarn"
    assert config.rope.attention_factor == 1.0
    assert config.attention_scale == pytest.approx(192**-0.5 * 1.3688879454113936**2)  # 0.1 ln 40 + 1
    assert config.weight_block == (128, 128)
    assert config.eos_token_ids == (1,)


def test_glm_as_published() -> None:
    config = SparseMlaConfig.from_dict(GLM)
    assert (config.num_layers, config.num_heads, config.record_dim, config.v_head_dim) == (78, 64, 576, 256)
    assert config.index_rope_interleaved
    assert config.attention_scale == 256**-0.5
    assert config.anchors == tuple(range(78))
    assert config.weight_block is None
    assert config.eos_token_ids == (154820, 154827, 154829)


def test_glm52_shares_as_published() -> None:
    config = SparseMlaConfig.from_dict(GLM52)
    assert tuple(layer for layer, own in enumerate(config.has_indexer) if own) == OWN
    assert config.anchors[:8] == (0, 1, 2, 2, 2, 2, 6, 6)
    assert config.anchors[-4:] == (74, 74, 74, 74)
    assert len(set(config.anchors)) == 21


@pytest.mark.parametrize("name", NOTATIONS)
def test_every_notation_says_the_same(name: str) -> None:
    assert SparseMlaConfig.from_dict(GLM | NOTATIONS[name]) == SparseMlaConfig.from_dict(GLM52)


@pytest.mark.parametrize(
    ("keys", "pattern"),
    [
        ({"index_topk_freq": 1}, "FFFFFF"),
        ({"index_topk_freq": 1, "index_skip_topk_offset": 0}, "FFFFFF"),
        ({"index_topk_freq": 2}, "FFSFSF"),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 1}, "FSSFSS"),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 6}, "FFFFFF"),
        ({"index_skip_topk_offset": 3}, "FFFFFF"),
        ({"index_topk_pattern": "FSFSSS"}, "FSFSSS"),
        ({}, "FFFFFF"),
    ],
    ids=str,
)
def test_notations_mean_what_transformers_reads(keys: dict[str, Any], pattern: str) -> None:
    config = SparseMlaConfig.from_dict(GLM | {"num_hidden_layers": 6} | keys)
    assert "".join("F" if own else "S" for own in config.has_indexer) == pattern
    oracle = GlmMoeDsaConfig(num_hidden_layers=6, **keys)
    assert [kind == "full" for kind in oracle.indexer_types] == list(config.has_indexer)


@pytest.mark.parametrize(
    ("oracle", "published"), [(DeepseekV32Config, DEEPSEEK), (GlmMoeDsaConfig, GLM), (GlmMoeDsaConfig, GLM52)]
)
def test_saved_by_transformers_is_the_same(oracle: Any, published: dict[str, Any]) -> None:
    """transformers renames rope's keys, fills in lists and drops keys that are only for other engines."""
    plain = {key: value for key, value in published.items() if key != "quantization_config"}
    saved = oracle(**plain).to_dict()
    assert SparseMlaConfig.from_dict(saved | {"architectures": plain["architectures"]}) == SparseMlaConfig.from_dict(
        plain
    )


@pytest.mark.parametrize(
    "change",
    [
        {"partial_rotary_factor": 1.0},
        {"partial_rotary_factor": 0.25},
        {"rope_parameters": {"rope_theta": 1000000, "rope_type": "default", "partial_rotary_factor": 0.25}},
        {"head_dim": 192, "partial_rotary_factor": 64 / 192},
    ],
    ids=str,
)
def test_a_rotary_share_that_is_the_rope_part_changes_nothing(change: dict[str, Any]) -> None:
    assert SparseMlaConfig.from_dict(GLM | change) == SparseMlaConfig.from_dict(GLM)


def test_the_indexers_rope_may_be_said() -> None:
    config = SparseMlaConfig.from_dict(DEEPSEEK | {"indexer_rope_interleave": True})
    assert config.index_rope_interleaved


def test_weight_shapes() -> None:
    shapes = weight_shapes(SparseMlaConfig.from_dict(GLM52))
    assert shapes["model.layers.3.self_attn.kv_b_proj.weight"] == (64 * (192 + 256), 512)
    assert shapes["model.layers.3.mlp.experts.255.down_proj.weight"] == (6144, 2048)
    assert "model.layers.2.self_attn.indexer.wk.weight" in shapes
    assert "model.layers.3.self_attn.indexer.wk.weight" not in shapes
    assert "model.layers.2.mlp.experts.0.down_proj.weight" not in shapes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM.*supported: DeepseekV32ForCausalLM, GlmMoeDsa"),
        ({"index_topk_pattern": "FSXF"}, "index_topk_pattern has 'X', which is not known; expected 'full' or"),
        ({"indexer_types": ["full", "both"]}, "indexer_types has 'both', which is not known"),
        ({"indexer_types": [True] * 78}, "indexer_types has True, which is not known"),
        ({"indexer_types": {"0": "full"}}, "indexer_types must be a name for each layer"),
        ({"indexer_types": TYPES[:-1]}, "indexer_types has 77 layers, but num_hidden_layers is 78"),
        ({"index_topk_pattern": "F" * 79}, "index_topk_pattern has 79 layers, but num_hidden_layers is 78"),
        ({"index_topk_pattern": "S" + "F" * 77}, "index_topk_pattern makes layer 0 a shared one, but no layer before"),
        ({"index_topk_freq": 0}, "index_topk_freq must be a positive integer, got 0"),
        (FREQUENCY | {"index_skip_topk_offset": 0}, "index_skip_topk_offset must be a positive integer, got 0"),
        (FREQUENCY | {"indexer_types": ["full"] * 78}, "indexer_types and index_topk_freq contradict each other"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types has 1 layers, but num_hidden_layers is 78"),
        ({"mlp_layer_types": ["wide"] * 78}, "mlp_layer_types must be a list of 'dense' and 'sparse'"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace must be a number of layers, 0 or more, got -1"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu' or absent, got 'gelu'"),
        ({"scoring_func": "softmax"}, "scoring_func must be 'sigmoid' or absent, got 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method must be 'noaux_tc' or absent"),
        ({"moe_layer_freq": 2}, "moe_layer_freq must be 1 or absent, got 2"),
        ({"rope_interleave": False}, "rope_interleave must be True or absent, got False"),
        ({"mlp_bias": True}, "mlp_bias must be False or absent"),
        ({"layer_types": ["sliding_attention"] * 78}, "layer_types has 'sliding_attention'"),
        ({"num_key_value_heads": 8}, "num_key_value_heads must be num_attention_heads \\(64\\).*, got 8"),
        ({"qk_rope_head_dim": 192}, "qk_head_dim must be qk_nope_head_dim \\+ qk_rope_head_dim \\(384\\), got 256"),
        ({"qk_rope_head_dim": 63, "qk_head_dim": None}, "qk_rope_head_dim must be even, got 63"),
        ({"index_head_dim": 32}, "index_head_dim 32 must be at least qk_rope_head_dim 64"),
        ({"q_lora_rank": None}, "q_lora_rank is missing"),
        ({"index_topk": None}, "index_topk is missing"),
        ({"n_group": 3}, "n_routed_experts 256 must be a multiple of n_group 3"),
        ({"n_group": 256}, "with 2 or more in each group"),
        ({"topk_group": 2}, "topk_group 2 must be at most n_group 1"),
        ({"n_group": 64, "topk_group": 1}, "num_experts_per_tok 8 must be at most 4"),
        (
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor must be 1 or qk_rope_head_dim over the head \\(0.25\\)",
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            "'linear' is not supported with latent attention",
        ),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.factor is missing"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": -1}}, "factor must be a finite number above 0, got -1"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4, "mscale_all_dim": math.inf}},
            "rope_scaling.mscale_all_dim must be a finite number above 0, got inf",
        ),
        ({"routed_scaling_factor": math.nan}, "routed_scaling_factor must be a finite number above 0, got nan"),
        ({"num_hidden_layers": 1_000_000}, "num_hidden_layers must be at most 1,000, got 1,000,000"),
        ({"num_nextn_predict_layers": 10**12}, "num_nextn_predict_layers must be at most 1,000"),
        ({"n_routed_experts": 2**20}, "num_hidden_layers 78 times n_routed_experts 1,048,576 must be at most 250,000"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "quant_method 'compressed-tensors'.*FP8"),
        ({"quantization_config": {"quant_method": "fp8"}}, "weight_block_size must be two positive integers"),
        ({"quantization_config": FP8 | {"weight_block_size": [128]}}, "weight_block_size must be two .* got \\[128\\]"),
        ({"quantization_config": FP8 | {"fmt": "e5m2"}}, "fmt must be 'e4m3', got 'e5m2'"),
    ],
    ids=str,
)
def test_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"config.json: .*{message}|config.json: {message}"):
        SparseMlaConfig.from_dict(GLM | change)
