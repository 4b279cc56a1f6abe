"""Writes tiny random checkpoints, so that everything from file to answer can be tested offline in a second.

Tests and `hisparse` commands' own tests call `write_tiny`; what it writes loads here and in transformers alike.
The tokenizer is byte-level: one token a byte, a few special tokens, and a ChatML template.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hisparse.checkpoint.folder import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE
from hisparse.checkpoint.tokenizer import GENERATION_FILE
from hisparse.models.llama_config import LlamaConfig, weight_shapes

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
NUM_BYTES = 256
VOCAB_SIZE = NUM_BYTES + len(SPECIAL_TOKENS)
END_OF_TEXT, END_OF_TURN = NUM_BYTES, NUM_BYTES + 2
MODEL_TYPES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tiny(
    folder: Path,
    architecture: str = "LlamaForCausalLM",
    *,
    seed: int = 0,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    hidden_size: int = 64,
    intermediate_size: int = 96,
    max_positions: int = 4096,
    rope: dict[str, Any] | None = None,  # config.json's rope_parameters
    tied: bool = False,
    attention_bias: bool = False,  # where the architecture leaves the choice, like mlp_bias
    mlp_bias: bool = False,
    sharded: bool = False,
) -> Path:
    """Write a random float32 checkpoint with its tokenizer into `folder`, and return `folder`.

    Raises `CheckpointError` for an architecture or a rope variant that cannot be loaded either.
    """
    config = {
        "architectures": [architecture],
        "model_type": MODEL_TYPES.get(architecture),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "max_position_embeddings": max_positions,
        "vocab_size": VOCAB_SIZE,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "attention_bias": attention_bias,
        "mlp_bias": mlp_bias,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0} | (rope or {}),
        "eos_token_id": END_OF_TURN,
    }
    return write_checkpoint(folder, config, random_tensors(weight_shapes(LlamaConfig.from_dict(config)), seed), sharded)


def write_checkpoint(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], sharded: bool) -> Path:
    """Write a configuration, tensors (in one file or two), and the byte-level tokenizer; return `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / CONFIG_FILE, config)
    _write_json(folder / GENERATION_FILE, {"eos_token_id": [END_OF_TURN, END_OF_TEXT]})
    _write_tensors(folder, tensors, num_shards=2 if sharded else 1)
    _write_tokenizer(folder)
    return folder


def random_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """Float32 tensors that keep the size of what passes through them, by name."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            tensors[name] = 1 + 0.1 * noise
        elif name.endswith("bias"):
            tensors[name] = 0.1 * noise
        else:
            tensors[name] = noise * shape[-1] ** -0.5
    return tensors


def _write_tensors(folder: Path, tensors: dict[str, Tensor], num_shards: int) -> None:
    from safetensors.torch import save_file

    if num_shards == 1:
        save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        return
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        own = {name: tensors[name] for name in names[shard::num_shards]}
        save_file(own, folder / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(own, file_name)
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(characters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL_TOKENS])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        bos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    wrapped.save_pretrained(folder)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
