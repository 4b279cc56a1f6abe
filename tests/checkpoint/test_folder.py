"""Checkpoint folders: round trips of tiny ones, and one clear error for each way they can be broken."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hisparse.checkpoint import load
from hisparse.checkpoint.folder import read_config, read_tensors
from hisparse.checkpoint.tiny import END_OF_TEXT, END_OF_TURN, write_tiny
from hisparse.errors import CheckpointError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "tiny")


def rewrite_tensors(folder: Path, change: dict[str, Tensor | None]) -> None:
    """Replace, add or (None) remove tensors."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor | None] = {name: tensor.clone() for name, tensor in read_tensors(folder).items()}
    kept = {name: tensor for name, tensor in (tensors | change).items() if tensor is not None}
    save_file(kept, folder / WEIGHTS, metadata={"format": "pt"})


def rewrite_config(folder: Path, change: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(read_config(folder) | change))


def test_load_gives_model_tokenizer_and_stops(folder: Path) -> None:
    heard: list[str] = []
    loaded = load(folder, progress=heard.append)
    assert loaded.name == str(folder)
    assert loaded.path == folder
    assert loaded.stop_token_ids == (END_OF_TEXT, END_OF_TURN)
    assert loaded.model.config.eos_token_ids == (END_OF_TURN,)
    assert heard == []


def test_tokenizer_round_trips_any_text(folder: Path) -> None:
    tokenizer = load(folder).tokenizer
    text = "  Grüße, 世界!\n\t42 🙂"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_chat_template(folder: Path) -> None:
    tokenizer = load(folder).tokenizer
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert END_OF_TURN in tokenizer(text)["input_ids"]


def test_shards_equal_one_file(tmp_path: Path) -> None:
    one = read_tensors(write_tiny(tmp_path / "one"))
    two = read_tensors(write_tiny(tmp_path / "two", sharded=True))
    assert not (tmp_path / "two" / WEIGHTS).exists()
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert load(tmp_path / "two").model.config == load(tmp_path / "one").model.config


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    same = [read_tensors(write_tiny(tmp_path / name, seed=3))["lm_head.weight"] for name in "ab"]
    other = read_tensors(write_tiny(tmp_path / "c", seed=4))["lm_head.weight"]
    assert torch.equal(*same)
    assert not torch.equal(same[0], other)


def test_harmless_extras_are_ignored(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, tied=True)
    extras: dict[str, Tensor | None] = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "lm_head.weight": torch.zeros(3),
    }
    rewrite_tensors(folder, extras)
    model = load(folder).model
    assert model.head is model.embedding


def test_folder_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        read_config(tmp_path / "nowhere")


def test_config_missing(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        load(folder)


@pytest.mark.parametrize("content", [b"{not json", b"\xff\xfe\x00", b""])
def test_config_is_not_json(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read as JSON"):
        load(folder)


def test_config_is_not_an_object(folder: Path) -> None:
    (folder / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="must hold a JSON object, got list"):
        load(folder)


def test_architecture_is_not_supported(folder: Path) -> None:
    rewrite_config(folder, {"architectures": ["MambaForCausalLM"]})
    with pytest.raises(CheckpointError, match=r"MambaForCausalLM.*supported: LlamaForCausalLM, Qwen2.*Qwen3"):
        load(folder)


def test_no_weights(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=f"neither {WEIGHTS} nor {INDEX}"):
        load(folder)


def test_shard_missing(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, sharded=True)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1 of 2 shards .* missing, first model-00002-of-00002"):
        load(folder)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}'])
def test_index_without_a_weight_map(tmp_path: Path, content: str) -> None:
    folder = write_tiny(tmp_path, sharded=True)
    (folder / INDEX).write_text(content)
    with pytest.raises(CheckpointError, match="weight_map must name a file"):
        load(folder)


FIRST, SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
NORM = "model.norm.weight"


def rewrite_weight_map(folder: Path, change: dict[str, Any]) -> None:
    index = json.loads((folder / INDEX).read_text())
    kept = {name: shard for name, shard in (index["weight_map"] | change).items() if shard is not None}
    (folder / INDEX).write_text(json.dumps(index | {"weight_map": kept}))


def add_to_shard(folder: Path, shard: str, tensors: dict[str, Tensor]) -> None:
    from safetensors.torch import load_file, save_file

    save_file(load_file(folder / shard) | tensors, folder / shard, metadata={"format": "pt"})


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """With the last norm in the first of two shards."""
    folder = write_tiny(tmp_path / "sharded", sharded=True)
    assert json.loads((folder / INDEX).read_text())["weight_map"][NORM] == FIRST
    return folder


def test_a_tensor_in_another_shard_too(sharded: Path) -> None:
    add_to_shard(sharded, SECOND, {NORM: torch.ones(64)})
    with pytest.raises(CheckpointError, match=f"{INDEX}: weight_map puts {NORM} in {FIRST}, but {SECOND} holds"):
        load(sharded)


def test_a_tensor_that_is_twice_where_the_index_does_not_name_it(sharded: Path) -> None:
    rewrite_weight_map(sharded, {NORM: None})
    load(sharded)
    add_to_shard(sharded, SECOND, {NORM: torch.ones(64)})
    with pytest.raises(CheckpointError, match=f"{SECOND}: {NORM} is in an earlier shard too"):
        load(sharded)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({NORM: SECOND}, f"weight_map puts {NORM} in {SECOND}, but {FIRST} holds a tensor of that name"),
        ({"model.more.weight": FIRST}, f"puts model.more.weight in {FIRST}, which does not hold it .1 such tensors"),
        ({NORM: 1}, f"weight_map must name a file for {NORM}, got 1"),
        ({NORM: ["a"]}, f"weight_map must name a file for {NORM}, got \\['a'\\]"),
    ],
    ids=["another file", "no such tensor", "a number", "a list"],
)
def test_an_index_that_contradicts_the_shards(sharded: Path, change: dict[str, Any], message: str) -> None:
    rewrite_weight_map(sharded, change)
    with pytest.raises(CheckpointError, match=f"{INDEX}: .*{message}|{INDEX}: {message}"):
        load(sharded)


@pytest.mark.parametrize("size", [0, 4, 500, -1])
def test_weights_truncated(folder: Path, size: int) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:size])
    with pytest.raises(CheckpointError, match=f"{WEIGHTS} is truncated or not a safetensors file"):
        load(folder)


def test_weights_are_something_else(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"version https://git-lfs.github.com/spec/v1\n" * 3)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        load(folder)


def test_tensors_missing(folder: Path) -> None:
    rewrite_tensors(folder, {"model.norm.weight": None})
    with pytest.raises(CheckpointError, match=r"1 missing \(model\.norm\.weight\)"):
        load(folder)


def test_many_missing_tensors_are_counted_and_the_first_named(folder: Path) -> None:
    rewrite_config(folder, {"num_hidden_layers": 3})
    with pytest.raises(CheckpointError, match=r"9 missing \(model\.layers\.2\.input_layernorm.*, \.\.\.\)"):
        load(folder)


def test_tensors_unexpected(folder: Path) -> None:
    rewrite_tensors(folder, {"model.vision.weight": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"1 unexpected \(model\.vision\.weight\)"):
        load(folder)


def test_tensors_of_wrong_shape(folder: Path) -> None:
    rewrite_tensors(folder, {"model.norm.weight": torch.ones(63)})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight \[63\], expected \[64\]"):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float8_e4m3fn])
def test_weights_that_are_no_plain_floats(folder: Path, dtype: torch.dtype) -> None:
    rewrite_tensors(folder, {"model.norm.weight": torch.ones(64).to(dtype)})
    with pytest.raises(CheckpointError, match=rf"1 not in a plain float dtype \(model\.norm\.weight {dtype}\)"):
        load(folder)


def test_tokenizer_missing(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(CheckpointError, match="the tokenizer cannot be loaded"):
        load(folder)


def test_tokenizer_damaged(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(CheckpointError, match="the tokenizer cannot be loaded"):
        load(folder)


def test_generation_config_may_be_absent(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    assert load(folder).stop_token_ids == (END_OF_TURN,)


def test_a_moved_folder_loads(folder: Path, tmp_path: Path) -> None:
    moved = tmp_path / "else where"
    shutil.move(folder, moved)
    assert load(str(moved)).path == moved
