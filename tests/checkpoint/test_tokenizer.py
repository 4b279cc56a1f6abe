"""Tokenizers of GGUF files: converted by transformers once, kept, and loaded from there."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from hisparse.cache_folder import cache_folder
from hisparse.checkpoint.gguf_file import GgufFile
from hisparse.checkpoint.tiny import END_OF_TURN
from hisparse.checkpoint.tokenizer import load_tokenizer, stop_token_ids
from hisparse.errors import CheckpointError
from tests.checkpoint.test_gguf import write_gguf

TEXT = "the 42<|im_end|> na\u00efve \U0001f600\n"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture
def file(tmp_path: Path) -> GgufFile:
    return GgufFile(write_gguf(tmp_path / "tiny.gguf", "llama", {}, {"tokenizer.chat_template": TEMPLATE}))


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the GGUF files that transformers was asked to convert."""
    names: list[str] = []
    convert: Callable[..., Any] = transformers.AutoTokenizer.from_pretrained

    def counted(*arguments: Any, **options: Any) -> Any:
        if "gguf_file" in options:
            names.append(options["gguf_file"])
        return convert(*arguments, **options)

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", counted)
    return names


def kept() -> list[Path]:
    return sorted((cache_folder() / "tokenizers").iterdir())


def test_converted_once_and_the_same_afterwards(file: GgufFile, conversions: list[str]) -> None:
    first, second = load_tokenizer(file), load_tokenizer(file)
    assert conversions == ["tiny.gguf"]
    assert len(kept()) == 1
    assert kept()[0].name.startswith("tiny-")
    assert first(TEXT)["input_ids"] == second(TEXT)["input_ids"]
    assert first.backend_tokenizer.to_str() == second.backend_tokenizer.to_str()
    assert first.special_tokens_map == second.special_tokens_map
    for tokenizer in (first, second):
        assert tokenizer.chat_template == TEMPLATE
        assert stop_token_ids(file, (), tokenizer) == (END_OF_TURN,)


def test_the_kept_tokenizer_begins_with_bos_where_the_file_says_so(tmp_path: Path) -> None:
    extra = {"tokenizer.ggml.bos_token_id": 256, "tokenizer.ggml.add_bos_token": True}
    file = GgufFile(write_gguf(tmp_path / "tiny.gguf", "llama", {}, extra, "llama-bpe"))
    for tokenizer in (load_tokenizer(file), load_tokenizer(file)):
        assert tokenizer("the")["input_ids"] == [256, *tokenizer("the", add_special_tokens=False)["input_ids"]]


def test_moved_file_finds_its_tokenizer(file: GgufFile, conversions: list[str], tmp_path: Path) -> None:
    load_tokenizer(file)
    moved = tmp_path / "elsewhere" / "tiny.gguf"
    moved.parent.mkdir()
    file.path.rename(moved)
    load_tokenizer(GgufFile(moved))
    assert len(conversions) == 1


def test_other_vocabulary_under_the_same_name(file: GgufFile, conversions: list[str]) -> None:
    load_tokenizer(file)
    other = GgufFile(write_gguf(file.path, "llama", {}, {"tokenizer.chat_template": "other"}))
    assert load_tokenizer(other).chat_template == "other"
    assert len(conversions) == len(kept()) == 2


def test_other_transformers_converts_again(
    file: GgufFile, conversions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load_tokenizer(file)
    # transformers puts a new module in its own place while it reads a GGUF file: patch the one that is there now
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "99.0")
    load_tokenizer(file)
    assert len(conversions) == 2


def test_unwritable_cache_folder_is_only_slower(
    file: GgufFile, conversions: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HISPARSE_CACHE", str(tmp_path / "file"))
    for _ in range(2):
        assert load_tokenizer(file).decode([0]) == load_tokenizer(file).decode([0])
    assert len(conversions) == 4


def test_disk_fills_up_while_saving(file: GgufFile, conversions: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def save(self: Any, folder: Path) -> None:
        folder.mkdir()
        (folder / "tokenizer.json").write_text("{")
        raise Exception("No space left on device (os error 28)")  # as tokenizers does

    monkeypatch.setattr(transformers.PreTrainedTokenizerFast, "save_pretrained", save)
    load_tokenizer(file)
    assert kept() == []  # no half of a tokenizer is left behind
    load_tokenizer(file)
    assert len(conversions) == 2


def test_losing_the_race_keeps_the_winner(file: GgufFile, monkeypatch: pytest.MonkeyPatch) -> None:
    save = transformers.PreTrainedTokenizerFast.save_pretrained

    def slow_save(self: Any, folder: Path) -> Any:
        winner = cache_folder() / "tokenizers" / folder.name
        save(self, winner)
        (winner / "first").touch()
        return save(self, folder)

    monkeypatch.setattr(transformers.PreTrainedTokenizerFast, "save_pretrained", slow_save)
    load_tokenizer(file)
    assert len(kept()) == 1
    assert (kept()[0] / "first").exists()


def test_damaged_copy_says_what_to_delete(file: GgufFile) -> None:
    load_tokenizer(file)
    (kept()[0] / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=rf"^the copy kept in {kept()[0]} is damaged .*delete that folder"):
        load_tokenizer(file)


def test_file_without_a_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "bare.gguf"
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(16))
    with pytest.raises(CheckpointError, match="the tokenizer cannot be loaded"):
        load_tokenizer(GgufFile(path))
