"""What config.json may say, in both of transformers' styles, and what is refused."""

import math
from typing import Any

import pytest

from hisparse.errors import CheckpointError
from hisparse.models import LlamaConfig

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 100,
    "max_position_embeddings": 1024,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 256}


def test_old_and_new_rope_styles_are_the_same() -> None:
    old = BASE | {"rope_theta": 5e5, "rope_scaling": {"type": "yarn"} | YARN}
    new = BASE | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5} | YARN}
    assert LlamaConfig.from_dict(old) == LlamaConfig.from_dict(new)
    assert LlamaConfig.from_dict(old).rope.theta == 5e5


def test_defaults() -> None:
    config = LlamaConfig.from_dict(BASE)
    assert (config.num_kv_heads, config.head_dim, config.tied_head) == (4, 16, False)
    assert (config.rope.variant, config.rope.theta) == ("default", 10_000.0)
    assert config.eos_token_ids == ()


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("LlamaForCausalLM", (False, False, False, 16)),
        ("Qwen2ForCausalLM", (True, False, False, 16)),
        ("Qwen3ForCausalLM", (False, False, True, 128)),
    ],
)
def test_what_an_architecture_fixes(architecture: str, expected: tuple[bool, bool, bool, int]) -> None:
    config = LlamaConfig.from_dict(BASE | {"architectures": [architecture]})
    assert (config.qkv_bias, config.output_bias, config.qk_norm, config.head_dim) == expected


@pytest.mark.parametrize(("value", "ids"), [(7, (7,)), ([7, 3], (7, 3)), (None, ())])
def test_eos_token_ids(value: object, ids: tuple[int, ...]) -> None:
    assert LlamaConfig.from_dict(BASE | {"eos_token_id": value}).eos_token_ids == ids


def test_a_factor_that_is_null_is_that_of_the_lengths() -> None:
    table = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 256}
    assert LlamaConfig.from_dict(BASE | {"rope_parameters": table}).rope.factor == 4.0


@pytest.mark.parametrize("variant", ["dynamic", "longrope", "mrope"])
def test_unsupported_rope_is_named_with_the_supported_ones(variant: str) -> None:
    with pytest.raises(
        CheckpointError, match=f"'{variant}' is not supported; supported: default, linear, llama3, yarn"
    ):
        LlamaConfig.from_dict(BASE | {"rope_scaling": {"rope_type": variant, "factor": 2.0}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*supported: LlamaForCausalLM, Qwen2.*, Qwen3"),
        ({"architectures": None}, "architectures .* is not supported"),
        ({"use_sliding_window": True}, "sliding-window attention is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config \\('awq'\\)"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, got 0"),
        ({"vocab_size": "100"}, "vocab_size must be a positive integer, got '100'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false, got 1"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers must be at most 1,000, got 1,000,000,000,000"),
        ({"vocab_size": 2**31}, "vocab_size must be at most 2,147,483,647, got 2,147,483,648"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a finite number above 0, got -1"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps must be a finite number above 0, got nan"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a finite number above 0, got 1000"),
        ({"rope_theta": math.inf}, "config.json: rope_theta must be a finite number above 0, got inf"),
        ({"rope_parameters": {"rope_theta": math.nan}}, "rope_parameters.rope_theta must be a finite number above 0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": math.inf}}, "rope_scaling.factor must be a finite number"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.factor is missing"),
        ({"rope_parameters": {"rope_type": "yarn", "mscale": math.nan, "mscale_all_dim": 1.0} | YARN}, "eters.mscale "),
        ({"rope_scaling": {"rope_type": "divisors"}}, "rope divisors must be finite numbers above 0, got None"),
        ({"rope_scaling": {"rope_type": "divisors", "divisors": [1.0, math.nan]}}, "rope divisors must be finite"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 must be a multiple of num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1 or absent, got 0.5"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one table for all layers"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor is missing"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
            "must be below",
        ),
    ],
    ids=str,
)
def test_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        LlamaConfig.from_dict(BASE | change)
