"""Holds a checkpoint's tensors against what its configuration promises, before a model is built from them.

`loaded.py` calls it between reading and building, for folders and GGUF files alike, so that a mismatch is one
message about the checkpoint and not a stack trace from the first layer.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from hisparse.errors import CheckpointError
from hisparse.models.llama_config import LlamaConfig
from hisparse.models.sparse_mla_config import SparseMlaConfig

NUM_LISTED = 3
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # quantised weights are plain by now

ModelConfig = LlamaConfig | SparseMlaConfig


def drop_harmless(config: ModelConfig, tensors: dict[str, Tensor]) -> None:
    """Remove, in place, what files hold beyond the model and nobody misses."""
    speculating = _speculating_layers(config, tensors)
    for name in [name for name in tensors if _is_harmless(name, config, speculating)]:
        del tensors[name]


def check_weights(
    config: ModelConfig, expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor], path: Path
) -> None:
    """Raise `CheckpointError` for tensors that are missing, unexpected, not of the expected shape, or not floats."""
    problems = [
        _listing("missing", [name for name in expected if name not in tensors], str),
        _listing("unexpected", [name for name in tensors if name not in expected], str),
        _misshapen(expected, tensors),
        _not_floats(expected, tensors),
    ]
    found = [problem for problem in problems if problem]
    if found:
        raise CheckpointError(
            f"{path}: the tensors are not those of a {config.architecture} with {config.num_layers} layers: "
            f"{'; '.join(found)}. config.json and weights are of different models, or the download is incomplete"
        )


def _speculating_layers(config: ModelConfig, tensors: Mapping[str, Tensor]) -> set[int]:
    """DeepSeek and GLM append layers that only speculate. They alone project embedding and hidden state together."""
    if not isinstance(config, SparseMlaConfig):
        return set()
    last = range(config.num_layers, config.num_layers + config.num_mtp_layers)
    return {layer for layer in last if f"model.layers.{layer}.eh_proj.weight" in tensors}


def _is_harmless(name: str, config: ModelConfig, speculating: set[int]) -> bool:
    # Old checkpoints store rope's frequencies; some that tie the head store it all the same.
    if name.endswith("rotary_emb.inv_freq") or (config.tied_head and name == "lm_head.weight"):
        return True
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return layer is not None and int(layer[1]) in speculating


def _misshapen(expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor]) -> str:
    shared = [name for name in expected if name in tensors]
    wrong = [name for name in shared if tuple(tensors[name].shape) != expected[name]]
    return _listing(
        "of wrong shape",
        wrong,
        lambda name: f"{name} {list(tensors[name].shape)}, expected {list(expected[name])}",
    )


def _not_floats(expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor]) -> str:
    wrong = [name for name in expected if name in tensors and tensors[name].dtype not in WEIGHT_DTYPES]
    return _listing("not in a plain float dtype", wrong, lambda name: f"{name} {tensors[name].dtype}")


def _listing(kind: str, names: list[str], describe: Callable[[str], str]) -> str:
    if not names:
        return ""
    more = ", ..." if len(names) > NUM_LISTED else ""
    return f"{len(names)} {kind} ({', '.join(describe(name) for name in names[:NUM_LISTED])}{more})"
