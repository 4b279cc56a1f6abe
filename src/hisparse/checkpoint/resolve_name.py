"""Turns what a user calls a model into a checkpoint folder or a GGUF file on this machine.

Every command's MODEL argument passes through `resolve_name`, by way of `loaded.py`. Nothing is downloaded
except the demo model.
"""

import os
from pathlib import Path

from hisparse.checkpoint.demo_model import DEMO_MODELS, Progress, fetch
from hisparse.errors import CheckpointError


def resolve_name(model: str | Path, progress: Progress | None = None) -> Path:
    """The folder or .gguf file that `model` names.

    Tried in this order: a demo model's name, a folder, a .gguf file, a name in the local Hugging Face cache.
    Raises `CheckpointError` that says what was tried.
    """
    if isinstance(model, str) and model in DEMO_MODELS:
        return fetch(model, progress)
    path = Path(model).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.is_file():
        raise CheckpointError(
            f"{path} is a file, but not a .gguf file; pass a .gguf file, or the folder that holds config.json"
        )
    snapshot = _hub_snapshot(str(model))
    if snapshot is None:
        raise CheckpointError(_not_found(model))
    return snapshot


def _hub_snapshot(name: str) -> Path | None:
    """The folder of a repository in the local hub cache, or None where it holds none of that name."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def _not_found(model: str | Path) -> str:
    hub = os.fspath(model)
    return (
        f"no model {hub!r}: it is not a demo model ({', '.join(DEMO_MODELS)}), not a folder or .gguf file below "
        f"{Path.cwd()}, and not a name in the local Hugging Face cache. Pass a path, "
        f"use `{next(iter(DEMO_MODELS))}`, or run `hf download {hub}` first"
    )
