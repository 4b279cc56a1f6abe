"""Loads a checkpoint: a name in, a model with its tokenizer out. The door of this folder.

Commands and examples call `load`; the engine takes what it returns.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hisparse.checkpoint.folder import read_config, read_tensors
from hisparse.checkpoint.fp8 import dequantise
from hisparse.checkpoint.gguf import gguf_config, gguf_tensors
from hisparse.checkpoint.gguf_file import GgufFile
from hisparse.checkpoint.packed_experts import split_packed_experts
from hisparse.checkpoint.resolve_name import resolve_name
from hisparse.checkpoint.tokenizer import load_tokenizer, stop_token_ids
from hisparse.checkpoint.weight_check import check_weights, drop_harmless
from hisparse.models import Model, llama_config, sparse_mla_config, sparse_mla_weights
from hisparse.models.config_values import architecture_of
from hisparse.models.llama import Llama
from hisparse.models.llama_config import LlamaConfig
from hisparse.models.sparse_mla import SparseMla
from hisparse.models.sparse_mla_config import SparseMlaConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


ARCHITECTURES = (*llama_config.ARCHITECTURES, *sparse_mla_config.ARCHITECTURES)


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to run."""

    name: str  # as the user gave it
    path: Path  # the folder or the GGUF file
    model: Model  # by the architecture
    tokenizer: "PreTrainedTokenizerBase"
    stop_token_ids: tuple[int, ...]  # ascending


def load(
    model: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    progress: Callable[[str], None] | None = None,
) -> Loaded:
    """Load a checkpoint folder, a GGUF file, a model of the local hub cache, or `smollm2`.

    `progress` hears of a download, if there must be one. Raises `CheckpointError` for whatever is
    wrong with the checkpoint.
    """
    path = resolve_name(model, progress)
    source = GgufFile(path) if path.is_file() else path
    config_dict = gguf_config(source) if isinstance(source, GgufFile) else read_config(source)
    config = _model_config(config_dict)
    tensors = _read_tensors(source, config_dict, dtype)
    decoder = _build(config, tensors, path, dtype, device)
    tokenizer = load_tokenizer(source)
    stops = stop_token_ids(source, config.eos_token_ids, tokenizer)
    return Loaded(str(model), path, decoder, tokenizer, stops)


def _read_tensors(source: Path | GgufFile, config: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    if isinstance(source, GgufFile):
        return gguf_tensors(source, config, dtype)
    return read_tensors(source)


def _model_config(config: dict[str, Any]) -> LlamaConfig | SparseMlaConfig:
    if architecture_of(config, ARCHITECTURES) in sparse_mla_config.ARCHITECTURES:
        return SparseMlaConfig.from_dict(config)
    return LlamaConfig.from_dict(config)


def _build(
    config: LlamaConfig | SparseMlaConfig,
    tensors: dict[str, Tensor],
    path: Path,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Llama | SparseMla:
    drop_harmless(config, tensors)
    if isinstance(config, SparseMlaConfig):
        dequantise(tensors, config.weight_block, dtype, path)
        split_packed_experts(tensors)
        check_weights(config, sparse_mla_weights.weight_shapes(config), tensors, path)
        return SparseMla(config, tensors, dtype=dtype, device=device)
    check_weights(config, llama_config.weight_shapes(config), tensors, path)
    return Llama(config, tensors, dtype=dtype, device=device)
