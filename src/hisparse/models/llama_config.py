"""The shape of a Llama-like decoder, read from a checkpoint's config.json and checked.

Llama, Qwen2 and Qwen3 are one decoder with four differences: which projections carry a bias, whether queries
and keys are normalised for each head, what `head_dim` defaults to, and whether the head is tied. `checkpoint`
feeds `LlamaConfig.from_dict`; `llama.py` computes from it, and `weight_shapes` says which tensors it needs.
"""

from dataclasses import dataclass
from typing import NamedTuple

from hisparse.errors import CheckpointError
from hisparse.models.config_values import (
    MOST_LAYERS,
    Config,
    architecture_of,
    boolean,
    positive_float,
    positive_int,
    token_ids,
)
from hisparse.models.rope import RopeConfig


class Traits(NamedTuple):
    """What an architecture fixes; None leaves it to the key `attention_bias` or `mlp_bias`."""

    qkv_bias: bool | None
    output_bias: bool | None
    mlp_bias: bool | None
    qk_norm: bool
    head_dim: int | None  # where config.json has none; None: hidden_size / num_heads


ARCHITECTURES = {
    "LlamaForCausalLM": Traits(qkv_bias=None, output_bias=None, mlp_bias=None, qk_norm=False, head_dim=None),
    "Qwen2ForCausalLM": Traits(qkv_bias=True, output_bias=False, mlp_bias=False, qk_norm=False, head_dim=None),
    "Qwen3ForCausalLM": Traits(qkv_bias=None, output_bias=None, mlp_bias=False, qk_norm=True, head_dim=128),
}


@dataclass(frozen=True)
class LlamaConfig:
    """One checkpoint's shape. Sizes are in elements."""

    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    rms_norm_eps: float
    tied_head: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"config.json: num_attention_heads {self.num_heads} must be a multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise CheckpointError(f"config.json: head_dim must be even for rope, got {self.head_dim}")

    @classmethod
    def from_dict(cls, config: Config) -> "LlamaConfig":
        """Read a config.json dictionary of transformers 4 or 5.

        Raises `CheckpointError` for an unsupported architecture or feature, and for wrong or missing values.
        """
        architecture = architecture_of(config, ARCHITECTURES)
        _refuse_unsupported(config)
        traits = ARCHITECTURES[architecture]
        num_heads = positive_int(config, "num_attention_heads")
        hidden_size = positive_int(config, "hidden_size")
        attention_bias = boolean(config, "attention_bias", False)
        return cls(
            architecture=architecture,
            num_layers=positive_int(config, "num_hidden_layers", most=MOST_LAYERS),
            num_heads=num_heads,
            num_kv_heads=positive_int(config, "num_key_value_heads", num_heads),
            head_dim=positive_int(config, "head_dim", traits.head_dim or hidden_size // num_heads),
            hidden_size=hidden_size,
            intermediate_size=positive_int(config, "intermediate_size"),
            vocab_size=positive_int(config, "vocab_size"),
            max_positions=positive_int(config, "max_position_embeddings"),
            rms_norm_eps=positive_float(config, "rms_norm_eps", 1e-6),
            tied_head=boolean(config, "tie_word_embeddings", False),
            qkv_bias=attention_bias if traits.qkv_bias is None else traits.qkv_bias,
            output_bias=attention_bias if traits.output_bias is None else traits.output_bias,
            mlp_bias=boolean(config, "mlp_bias", False) if traits.mlp_bias is None else traits.mlp_bias,
            qk_norm=traits.qk_norm,
            rope=RopeConfig.from_dict(config),
            eos_token_ids=token_ids(config, "eos_token_id"),
        )


def weight_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """The name, in transformers' naming, and the shape of every tensor that the model needs."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tied_head:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        for name, shape in _layer_shapes(config).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    return shapes


def _layer_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if config.qk_norm:
        shapes |= {
            "self_attn.q_norm.weight": (config.head_dim,),
            "self_attn.k_norm.weight": (config.head_dim,),
        }
    projections = (
        ("self_attn.q_proj", query, hidden, config.qkv_bias),
        ("self_attn.k_proj", key, hidden, config.qkv_bias),
        ("self_attn.v_proj", key, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, query, config.output_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    )
    for name, outputs, inputs, bias in projections:
        shapes[f"{name}.weight"] = (outputs, inputs)
        if bias:
            shapes[f"{name}.bias"] = (outputs,)
    return shapes


def _refuse_unsupported(config: Config) -> None:
    if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or []):
        raise CheckpointError(
            "config.json: sliding-window attention is not supported "
            f"(use_sliding_window {config.get('use_sliding_window')!r}); use a checkpoint with full attention"
        )
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise CheckpointError(f"config.json: hidden_act must be 'silu', got {activation!r}")
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise CheckpointError(
            f"config.json: quantization_config ({method!r}) is not supported; "
            "use the unquantized checkpoint or a GGUF file"
        )
