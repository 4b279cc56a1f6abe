"""The order in which a MODEL argument is looked up, and what is said when nothing is found."""

from pathlib import Path

import pytest

from hisparse.checkpoint import resolve_name as module
from hisparse.checkpoint.resolve_name import resolve_name
from hisparse.checkpoint.tiny import write_tiny
from hisparse.errors import CheckpointError


def test_demo_name_is_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "fetch", lambda name, progress: tmp_path / name)
    assert resolve_name("smollm2") == tmp_path / "smollm2"


def test_folder_and_gguf_file(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    assert resolve_name(tmp_path) == tmp_path
    assert resolve_name(str(file)) == file


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(CheckpointError, match=r"pass a \.gguf file, or the folder that holds"):
        resolve_name(file)


def test_name_in_the_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "0123456789012345678901234567890123456789"
    repository = tmp_path / "models--some--tiny"
    write_tiny(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert resolve_name("some/tiny") == repository / "snapshots" / commit


@pytest.mark.parametrize("name", ["no/such-model", "./no/such/folder", "no such name!", "missing.gguf"])
def test_nothing_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"not a demo model .*not a folder or \.gguf file.*use `smollm2`"):
        resolve_name(name)
