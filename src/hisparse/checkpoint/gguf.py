"""Translates a GGUF file into what a checkpoint folder would have held: a config dictionary and named tensors.

`loaded.py` calls it; from there on nothing knows that the weights were a GGUF file. llama.cpp's names become
transformers' names, and the rows of Llama's query and key matrices go back to the order that half-split rope
expects (llama.cpp interleaves them; Qwen's it leaves alone).
"""

import re
from typing import Any

import torch
from torch import Tensor

from hisparse.checkpoint.gguf_file import GgufFile
from hisparse.errors import CheckpointError

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
ROPE_DIVISORS = "rope_freqs.weight"  # how llama.cpp stores llama3 rope
SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """The file's shape as a config.json dictionary."""
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise CheckpointError(f"{file.path}: architecture {architecture!r} is not supported; supported: {supported}")
    _refuse_unsupported(file, architecture)
    own = {key: file.metadata.get(f"{architecture}.{key}") for key in SIZES}
    config = {SIZES[key]: value for key, value in own.items() if value is not None}
    biases = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_gate.bias"}
    return config | {
        "architectures": [ARCHITECTURES[architecture]],
        "vocab_size": _vocab_size(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_scaling": _rope_scaling(file, architecture),
        "eos_token_id": _end_tokens(file),
        **{key: name in file.tensors for key, name in biases.items()},
    }


def gguf_tensors(file: GgufFile, config: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """Every tensor, dequantised to `dtype`, under transformers' names."""
    tensors = {}
    for name in file.tensors:
        if name == ROPE_DIVISORS:
            continue  # it is in the configuration
        tensor = file.read(name, dtype)
        if config["architectures"] == ["LlamaForCausalLM"]:
            tensor = _undo_interleave(name, tensor, config)
        tensors[_translate(name)] = tensor
    return tensors


def _undo_interleave(name: str, tensor: Tensor, config: dict[str, Any]) -> Tensor:
    num_heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config.get("num_key_value_heads", config["num_attention_heads"]),
    }
    kind = name.split(".")[-2]
    if kind not in num_heads:
        return tensor
    pairs = tensor.reshape(num_heads[kind], -1, 2, *tensor.shape[1:])  # [heads, head_dim / 2, 2, ...]
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _translate(name: str) -> str:
    """transformers' name for one of llama.cpp's; an unknown one keeps its name, and the weight check tells."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, kind, suffix = match.groups()
        return f"model.layers.{layer}.{LAYER_NAMES[kind]}.{suffix}" if kind in LAYER_NAMES else name
    kind, _, suffix = name.rpartition(".")
    return f"{OUTER_NAMES[kind]}.{suffix}" if kind in OUTER_NAMES else name


def _refuse_unsupported(file: GgufFile, architecture: str) -> None:
    if (num_parts := file.metadata.get("split.count", 1)) > 1:
        raise CheckpointError(f"{file.path} is one of {num_parts} parts; merge them with llama-gguf-split --merge")
    value = file.metadata.get
    width, num_heads = value(f"{architecture}.embedding_length", 0), value(f"{architecture}.attention.head_count", 1)
    head_dim = value(f"{architecture}.attention.key_length", width // num_heads)
    for key in ("rope.dimension_count", "attention.value_length"):
        found = value(f"{architecture}.{key}", head_dim)
        if found != head_dim:
            raise CheckpointError(f"{file.path}: {architecture}.{key} must be the head size {head_dim}, got {found}")


def _vocab_size(file: GgufFile) -> int:
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.path}: tensor token_embd.weight is missing; it is not a language model")
    return file.tensors["token_embd.weight"].shape[0]


def _rope_scaling(file: GgufFile, architecture: str) -> dict[str, Any] | None:
    if ROPE_DIVISORS in file.tensors:
        return {"rope_type": "divisors", "divisors": file.read(ROPE_DIVISORS, torch.float32).tolist()}
    prefix = f"{architecture}.rope.scaling."
    kind = file.metadata.get(f"{prefix}type", "none")
    if kind == "none":
        return None
    keys = {"factor": "factor", "original_max_position_embeddings": "original_context_length"}
    return {"rope_type": kind} | {key: file.metadata.get(prefix + own) for key, own in keys.items()}


def _end_tokens(file: GgufFile) -> list[int]:
    """End of text, of a turn, and of a message, as far as the file names them."""
    named = [file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    return sorted({int(token) for token in named if token is not None})
