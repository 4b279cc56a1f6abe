"""A model as far as its configuration tells: how it attends, and the shapes of its weights.

The engine's own family of the model is built over a model without weights, so records, selection state and index groups
are those that the engine would use, whatever the configuration of the cache says.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hisparse.attention.latent_records import FP8_GROUP
from hisparse.checkpoint.folder import read_config
from hisparse.checkpoint.gguf import gguf_config
from hisparse.checkpoint.gguf_file import GgufFile
from hisparse.checkpoint.loaded import ARCHITECTURES
from hisparse.checkpoint.resolve_name import resolve_name
from hisparse.config import HiSparseConfig
from hisparse.engine.build import build_family
from hisparse.engine.family import Family
from hisparse.errors import CheckpointError
from hisparse.models import Llama, LlamaConfig, Model, SparseMla, SparseMlaConfig, llama_config, sparse_mla_weights
from hisparse.models.config_values import architecture_of
from hisparse.models.sparse_mla_config import ARCHITECTURES as LATENT_ARCHITECTURES
from hisparse.plan.named_models import NAMED_MODELS, named_config

ModelConfig = LlamaConfig | SparseMlaConfig


@dataclass(frozen=True)
class PlannedModel:
    """What MODEL is."""

    name: str  # as the user gave it
    config: ModelConfig
    dtype: torch.dtype  # of records, selection state and of weights that are not quantised
    kept_plain: tuple[str, ...] = ()  # parts of the names of weights that a quantised checkpoint leaves alone

    @property
    def is_latent(self) -> bool:
        """Whether it has latent attention, whose record all heads share."""
        return isinstance(self.config, SparseMlaConfig)

    def can_share(self, num_shares: int) -> bool:
        """Whether attention can be divided so; latent attention's one record cannot, and goes to every share whole."""
        return isinstance(self.config, SparseMlaConfig) or not self.config.num_kv_heads % num_shares

    @property
    def can_keep_fp8_index_keys(self) -> bool:
        """Whether it has an indexer whose keys one scale each is enough for."""
        return isinstance(self.config, SparseMlaConfig) and self.config.index_head_dim <= FP8_GROUP

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor that the model needs, by name."""
        if isinstance(self.config, SparseMlaConfig):
            return sparse_mla_weights.weight_shapes(self.config)
        return llama_config.weight_shapes(self.config)

    def family(self, config: HiSparseConfig, num_shares: int = 1) -> Family:
        """How the engine attends with it; with `num_shares`, over that part of the KV heads.

        Raises:
            ValueError: a configuration that is not for this kind of model, or heads that cannot be shared out.
        """
        return build_family(config, _without_weights(_share(self.config, num_shares), self.dtype))


def read_model(name: str, dtype: torch.dtype) -> PlannedModel:
    """A path, a named model, or whatever else the commands take as MODEL. Reads no weights.

    Raises `CheckpointError` for a model that is not there or not supported.
    """
    if name in NAMED_MODELS and not Path(name).exists():
        return _planned(name, named_config(name), dtype)
    try:
        path = resolve_name(name)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. Known by name without a download: {', '.join(NAMED_MODELS)}") from None
    return _planned(name, gguf_config(GgufFile(path)) if path.is_file() else read_config(path), dtype)


def _planned(name: str, config: Mapping[str, Any], dtype: torch.dtype) -> PlannedModel:
    is_latent = architecture_of(config, ARCHITECTURES) in LATENT_ARCHITECTURES
    shape = SparseMlaConfig.from_dict(config) if is_latent else LlamaConfig.from_dict(config)
    return PlannedModel(name, shape, dtype, _kept_plain(config.get("quantization_config") or {}))


def _kept_plain(quantization: Mapping[str, Any]) -> tuple[str, ...]:
    names = quantization.get("modules_to_not_convert") or []
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise CheckpointError(
            f"config.json: quantization_config: modules_to_not_convert must be a list of names, got {names!r}"
        )
    return tuple(names)


def _share(config: ModelConfig, num_shares: int) -> ModelConfig:
    """The part of a model with grouped-query attention that one of `num_shares` GPUs computes."""
    if num_shares == 1 or isinstance(config, SparseMlaConfig):
        return config
    if config.num_kv_heads % num_shares:
        raise ValueError(
            f"{config.num_kv_heads} KV heads cannot be shared out to {num_shares} GPUs: use --attention dp, or a "
            f"number of GPUs that divides them"
        )
    return replace(config, num_kv_heads=config.num_kv_heads // num_shares, num_heads=config.num_heads // num_shares)


def _without_weights(config: ModelConfig, dtype: torch.dtype) -> Model:
    """The model as far as a family looks at it for sizes; weights, even on the meta device, would take ten seconds."""
    model: Model = SparseMla.__new__(SparseMla) if isinstance(config, SparseMlaConfig) else Llama.__new__(Llama)
    model.config, model.dtype, model.device = config, dtype, torch.device("meta")
    return model
