"""Folders of models with sparse latent attention: what is extra, what is missing, and what is packed."""

from pathlib import Path

import pytest
import torch

from hisparse.checkpoint import load
from hisparse.checkpoint.folder import read_config, read_tensors
from hisparse.checkpoint.packed_experts import split_packed_experts
from hisparse.checkpoint.tiny import END_OF_TEXT, END_OF_TURN
from hisparse.checkpoint.tiny_mla import FAMILIES, NOTATIONS, pack_experts, write_tiny_mla
from hisparse.errors import CheckpointError
from hisparse.models.sparse_mla import SparseMla
from tests.checkpoint.test_folder import rewrite_config, rewrite_tensors
from tests.models.loading import load_sparse_mla

INDEXER_KEY = "self_attn.indexer.wk.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_mla(tmp_path / "tiny", "glm-5.2")


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_loads(name: str, tmp_path: Path) -> None:
    loaded = load(write_tiny_mla(tmp_path, name))
    assert isinstance(loaded.model, SparseMla)
    assert loaded.model.config.num_index_heads >= 8
    assert loaded.stop_token_ids == (END_OF_TEXT, END_OF_TURN)
    assert loaded.tokenizer.decode(loaded.tokenizer("Grüße")["input_ids"]) == "Grüße"


@pytest.mark.parametrize("notation", NOTATIONS)
def test_each_notation_is_what_it_says_and_nothing_else(notation: str, tmp_path: Path) -> None:
    config = read_config(write_tiny_mla(tmp_path, "glm-5.2", notation=notation))
    kind = {"types": "indexer_types", "frequency": "index_topk_freq"}.get(notation, "index_topk_pattern")
    assert [key for key in ("indexer_types", "index_topk_pattern", "index_topk_freq") if key in config] == [kind]
    assert load_sparse_mla(tmp_path).config.anchors == (0, 1, 2, 2, 2, 2, 6, 6)


def test_layers_for_speculation_are_ignored_even_in_fp8(folder: Path) -> None:
    extra = {
        "model.layers.8.eh_proj.weight": torch.zeros(2, 2, dtype=torch.float8_e4m3fn),
        f"model.layers.8.{INDEXER_KEY}": torch.zeros(3),
    }
    rewrite_tensors(folder, dict(extra))
    load(folder)
    rewrite_config(folder, {"num_nextn_predict_layers": 0})
    with pytest.raises(CheckpointError, match=r"model\.layers\.8\.eh_proj\.weight is FP8"):
        load(folder)


def test_fewer_layers_than_the_files_hold_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_mla(tmp_path, "glm-5.1")
    for too_few in (2, 3):  # one too few could be taken for a layer that only speculates
        rewrite_config(folder, {"num_hidden_layers": too_few})
        with pytest.raises(CheckpointError, match=rf"unexpected \(model\.layers\.{too_few}\."):
            load(folder)


def test_a_missing_indexer_is_named(folder: Path) -> None:
    rewrite_tensors(folder, {f"model.layers.6.{INDEXER_KEY}": None})
    with pytest.raises(CheckpointError, match=rf"GlmMoeDsa.* 8 layers: 1 missing \(model\.layers\.6\.{INDEXER_KEY}\)"):
        load(folder)


def test_an_indexer_in_a_shared_layer_is_unexpected(folder: Path) -> None:
    key = read_tensors(folder)[f"model.layers.6.{INDEXER_KEY}"].clone()
    rewrite_tensors(folder, {f"model.layers.7.{INDEXER_KEY}": key})
    with pytest.raises(CheckpointError, match=rf"1 unexpected \(model\.layers\.7\.{INDEXER_KEY}\)"):
        load(folder)


def test_a_missing_expert_is_named(folder: Path) -> None:
    rewrite_tensors(folder, {"model.layers.3.mlp.experts.5.up_proj.weight": None})
    with pytest.raises(CheckpointError, match=r"1 missing \(model\.layers\.3\.mlp\.experts\.5\.up_proj\.weight\)"):
        load(folder)


def test_packed_experts_come_apart_as_they_were(folder: Path) -> None:
    tensors = read_tensors(folder)
    packed = pack_experts(tensors, num_experts=8)
    assert packed["model.layers.1.mlp.experts.gate_up_proj"].shape == (8, 2 * 48, 64)
    assert len(packed) < len(tensors)
    split_packed_experts(packed)
    assert packed.keys() == tensors.keys()
    assert all(torch.equal(packed[name], tensors[name]) for name in tensors)


def test_packed_experts_of_another_number_or_shape_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_mla(tmp_path, "glm-5.1", packed_experts=True)
    name = "model.layers.1.mlp.experts.down_proj"
    packed = read_tensors(folder)[name].clone()
    rewrite_tensors(folder, {name: packed[:7]})
    with pytest.raises(CheckpointError, match=r"1 missing \(model\.layers\.1\.mlp\.experts\.7\.down_proj\.weight\)"):
        load(folder)
    rewrite_tensors(folder, {name: packed[..., :40].contiguous()})
    with pytest.raises(CheckpointError, match=r"8 of wrong shape .*down_proj\.weight \[64, 40\], expected \[64, 48\]"):
        load(folder)
    rewrite_tensors(folder, {name: packed[0]})
    with pytest.raises(CheckpointError, match=r"1 unexpected \(model\.layers\.1\.mlp\.experts\.down_proj\)"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "notation", "message"),
    [("glm-4", "types", "one of deepseek-v3.2, glm-5.1, glm-5.2, got 'glm-4'"), ("glm-5.2", "x", "notation: expected")],
)
def test_unknown_names(name: str, notation: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        write_tiny_mla(tmp_path, name, notation=notation)


def test_a_notation_that_nobody_knows_names_file_and_key(folder: Path) -> None:
    rewrite_config(folder, {"indexer_types": ["full", "lent"] * 4})
    with pytest.raises(CheckpointError, match=r"config\.json: indexer_types has 'lent', which is not known"):
        load(folder)
