"""Reads a checkpoint folder as transformers writes it: config.json and safetensors, in one file or in shards.

`loaded.py` calls it for folders and hub snapshots. What comes out is a dictionary and named tensors, unchecked
against each other; `weight_check.py` does that.
"""

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from hisparse.errors import CheckpointError

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def read_config(folder: Path) -> dict[str, Any]:
    """The dictionary in `folder`/config.json."""
    if not folder.is_dir():
        raise CheckpointError(f"checkpoint folder {folder} does not exist; pass a folder that holds {CONFIG_FILE}")
    return read_json(folder / CONFIG_FILE)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the folder's safetensors files, by name, on the CPU.

    Raises `CheckpointError` for files that are missing or damaged, and for shards that are not as their index says.
    """
    if (folder / WEIGHTS_FILE).is_file():
        return _read_safetensors(folder / WEIGHTS_FILE)
    weight_map = _read_weight_map(folder)
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(weight_map.values())):
        own = _read_safetensors(folder / shard)
        _check_shard(folder, shard, own, tensors, weight_map)
        tensors |= own
    if absent := [name for name in weight_map if name not in tensors]:
        raise CheckpointError(
            f"{folder / INDEX_FILE}: weight_map puts {absent[0]} in {weight_map[absent[0]]}, which does not hold it "
            f"({len(absent)} such tensors); download the checkpoint again"
        )
    return tensors


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file that a checkpoint needs."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing; a checkpoint folder holds {CONFIG_FILE}, safetensors and a tokenizer"
        ) from None
    except (OSError, ValueError) as error:  # not JSON and not UTF-8 are ValueErrors
        raise CheckpointError(f"{path} cannot be read as JSON: {error}; download it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def _read_weight_map(folder: Path) -> dict[str, str]:
    """The index's file for each tensor; these files are there."""
    index = folder / INDEX_FILE
    if not index.is_file():
        raise CheckpointError(
            f"{folder} holds neither {WEIGHTS_FILE} nor {INDEX_FILE}; "
            "other formats are not read: save the model with safetensors, or pass a .gguf file"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map must name a file for each tensor, got {weight_map!r}")
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise CheckpointError(f"{index}: weight_map must name a file for {name}, got {shard!r}")
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(shards)} shards named in {INDEX_FILE} are missing, "
            f"first {', '.join(missing[:3])}; download the checkpoint again"
        )
    return weight_map


def _check_shard(
    folder: Path, shard: str, own: dict[str, Tensor], earlier: dict[str, Tensor], weight_map: dict[str, str]
) -> None:
    """Nothing may be where the index does not put it. What the index does not name may be anywhere, but once."""
    for name in own:
        if (named := weight_map.get(name, shard)) != shard:
            raise CheckpointError(
                f"{folder / INDEX_FILE}: weight_map puts {name} in {named}, but {shard} holds a tensor of that name; "
                "download the checkpoint again"
            )
        if name in earlier:
            raise CheckpointError(
                f"{folder / shard}: {name} is in an earlier shard too, and {INDEX_FILE} names neither; "
                "download the checkpoint again"
            )


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is truncated or not a safetensors file ({path.stat().st_size} bytes): {error}; download it again"
        ) from error
    return tensors
