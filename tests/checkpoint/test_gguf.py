"""GGUF files, written here from tiny checkpoints with the gguf package and read back."""

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor

from hisparse.checkpoint import load
from hisparse.checkpoint.folder import read_tensors
from hisparse.checkpoint.gguf import LAYER_NAMES, OUTER_NAMES, gguf_config, gguf_tensors
from hisparse.checkpoint.gguf_file import GgufFile
from hisparse.checkpoint.tiny import END_OF_TURN, SPECIAL_TOKENS, write_tiny
from hisparse.errors import CheckpointError

SHAPE = {
    "block_count": 2,
    "context_length": 4096,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 16,
}
FLOATS = {"attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 10_000.0}


def gguf_name(name: str) -> str:
    inner, suffix = name.removeprefix("model.layers.").rsplit(".", 1)
    if name.startswith("model.layers."):
        layer, kind = inner.split(".", 1)
        return f"blk.{layer}.{next(own for own, ours in LAYER_NAMES.items() if ours == kind)}.{suffix}"
    return f"{next(own for own, ours in OUTER_NAMES.items() if ours == inner)}.{suffix}"


def interleave(name: str, tensor: Tensor) -> Tensor:
    """What llama.cpp's converter does to Llama's query and key rows."""
    num_heads = {"attn_q": 4, "attn_k": 2}.get(name.split(".")[-2])
    if num_heads is None:
        return tensor
    halves = tensor.reshape(num_heads, 2, -1, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def write_gguf(
    path: Path,
    architecture: str,
    tensors: dict[str, Tensor],
    extra: dict[str, Any] | None = None,
    pre: str = "smollm",
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for key, size in SHAPE.items():
        writer.add_uint32(f"{architecture}.{key}", size)
    for key, number in FLOATS.items():
        writer.add_float32(f"{architecture}.{key}", number)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    # One rare byte makes room for one merge.
    characters = sorted(ByteLevel.alphabet())[:-1]
    writer.add_token_list([*characters, "th", *SPECIAL_TOKENS])
    writer.add_token_types([1] * 256 + [3] * len(SPECIAL_TOKENS))
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(END_OF_TURN)
    for key, value in (extra or {}).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(folder: Path, architecture: str) -> dict[str, Tensor]:
    """A tiny folder's tensors as llama.cpp's converter names and orders them."""
    own = {gguf_name(name): tensor for name, tensor in read_tensors(folder).items()}
    return {name: interleave(name, tensor) if architecture == "llama" else tensor for name, tensor in own.items()}


@pytest.fixture
def llama(tmp_path: Path) -> dict[str, Tensor]:
    return converted(write_tiny(tmp_path / "folder"), "llama")


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("llama", {"architecture": "LlamaForCausalLM"}),
        ("llama", {"architecture": "LlamaForCausalLM", "tied": True, "attention_bias": True}),
        ("qwen2", {"architecture": "Qwen2ForCausalLM"}),
        ("qwen3", {"architecture": "Qwen3ForCausalLM"}),
    ],
    ids=["llama", "llama tied biased", "qwen2", "qwen3"],
)
def test_round_trip_equals_the_folder(architecture: str, options: dict[str, Any], tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "folder", **options)
    expected = read_tensors(folder)
    file = GgufFile(write_gguf(tmp_path / "tiny.gguf", architecture, converted(folder, architecture)))
    config = gguf_config(file)
    found = gguf_tensors(file, config, torch.float32)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    ours, theirs = load(file.path).model.config, load(folder).model.config
    assert ours.rms_norm_eps == pytest.approx(theirs.rms_norm_eps)  # GGUF stores float32
    assert dataclasses.replace(ours, rms_norm_eps=theirs.rms_norm_eps) == theirs


def test_tokenizer(tmp_path: Path, llama: dict[str, Tensor]) -> None:
    loaded = load(write_gguf(tmp_path / "tiny.gguf", "llama", llama))
    ids = loaded.tokenizer("the 42<|im_end|>")["input_ids"]
    assert loaded.tokenizer.convert_ids_to_tokens(ids) == ["th", "e", "Ġ", "4", "2", "<|im_end|>"]
    assert loaded.tokenizer.decode(ids) == "the 42<|im_end|>"
    assert loaded.stop_token_ids == (END_OF_TURN,)


def test_llama3_rope_comes_from_its_divisors(tmp_path: Path, llama: dict[str, Tensor]) -> None:
    divisors = torch.tensor([1.0, 1, 1, 1, 2, 4, 8, 8])
    loaded = load(write_gguf(tmp_path / "tiny.gguf", "llama", llama | {"rope_freqs.weight": divisors}))
    plain = load(write_gguf(tmp_path / "plain.gguf", "llama", llama))
    assert torch.equal(loaded.model.inverse_frequency, plain.model.inverse_frequency / divisors)


def test_yarn_comes_from_the_metadata(tmp_path: Path, llama: dict[str, Tensor]) -> None:
    extra = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 1024,
    }
    rope = load(write_gguf(tmp_path / "tiny.gguf", "llama", llama, extra)).model.config.rope
    assert (rope.variant, rope.factor, rope.original_max_positions) == ("yarn", 4.0, 1024)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"split.count": 3}, "one of 3 parts; merge them"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count must be the head size 16, got 8"),
        ({"llama.rope.scaling.type": "longrope"}, "rope type 'longrope' is not supported"),
    ],
    ids=str,
)
def test_unsupported_metadata(extra: dict[str, Any], message: str, tmp_path: Path, llama: dict[str, Tensor]) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(write_gguf(tmp_path / "tiny.gguf", "llama", llama, extra))


def test_architecture_is_not_supported(tmp_path: Path, llama: dict[str, Tensor]) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "gemma3", llama)
    with pytest.raises(CheckpointError, match="'gemma3' is not supported; supported: llama, qwen2, qwen3"):
        load(path)


def test_tensors_missing(tmp_path: Path, llama: dict[str, Tensor]) -> None:
    del llama["blk.1.ffn_up.weight"]
    with pytest.raises(CheckpointError, match=r"1 missing \(model\.layers\.1\.mlp\.up_proj\.weight\)"):
        load(write_gguf(tmp_path / "tiny.gguf", "llama", llama))


def test_tensors_unexpected_keep_their_own_name(tmp_path: Path, llama: dict[str, Tensor]) -> None:
    extra = {"blk.0.attn_sinks.weight": torch.ones(4)}
    with pytest.raises(CheckpointError, match=r"1 unexpected \(blk\.0\.attn_sinks\.weight\)"):
        load(write_gguf(tmp_path / "tiny.gguf", "llama", llama | extra))


@pytest.mark.parametrize("content", [b"", b"GGU", b"PK\x03\x04 a zip file"])
def test_not_a_gguf_file(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"other\.gguf is not a GGUF file"):
        load(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        GgufFile(tmp_path / "nowhere.gguf")


@pytest.mark.parametrize("kept", [4, 8, 20, 100, 3000, 6000, -1])
def test_truncated(kept: int, tmp_path: Path, llama: dict[str, Tensor]) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "llama", llama)
    path.write_bytes(path.read_bytes()[: kept if kept > 0 else -40])  # the last tensor may end in padding
    with pytest.raises(CheckpointError, match=r"truncated or damaged.*download it again"):
        load(path)


def test_every_damaged_byte_of_the_header_is_an_error_or_harmless(tmp_path: Path, llama: dict[str, Tensor]) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "llama", llama)
    content = bytearray(path.read_bytes())
    for at in range(4, 400, 7):
        damaged = bytearray(content)
        damaged[at] ^= 0xFF
        path.write_bytes(damaged)
        try:
            GgufFile(path)
        except CheckpointError as error:
            assert str(path) in str(error)  # noqa: PT017


def test_old_version(tmp_path: Path) -> None:
    path = tmp_path / "old.gguf"
    path.write_bytes(b"GGUF" + (1).to_bytes(4, "little") + bytes(64))
    with pytest.raises(CheckpointError, match="GGUF version 1 is not supported; supported: 2 and 3"):
        load(path)
