"""Where a result comes from: device, driver, torch and commit."""

import subprocess
from pathlib import Path
from typing import Any

import torch


def provenance(commit: str | None = None) -> dict[str, Any]:
    """What a GPU result belongs to; `commit` where the sources have no history beside them."""
    return {
        "device": torch.cuda.get_device_name(),
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "commit": commit or commit_here(),
    }


def commit_here() -> str | None:
    """The commit of these sources, "-dirty" with changes; None without git or history."""
    return _first_line("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty")


def _first_line(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().partition("\n")[0] or None
