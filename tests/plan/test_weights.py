"""Bytes of weights are those of the files, and add up over GPUs."""

import json
from pathlib import Path

import pytest

from hisparse.checkpoint.folder import read_tensors
from hisparse.errors import CheckpointError
from hisparse.plan.weights import weight_bytes
from tests.plan.families import EVERY_FAMILY, ask_named, ask_tiny, write_family


@pytest.mark.parametrize("name", EVERY_FAMILY)
@pytest.mark.parametrize("fp8", [False, True])
def test_bytes_are_those_of_the_files(name: str, fp8: bool, tmp_path: Path) -> None:
    folder = write_family(tmp_path / "tiny", name, fp8=fp8)
    tensors = read_tensors(folder).values()
    assert ask_tiny(folder).weights.total == sum(tensor.nbytes for tensor in tensors)


def test_modules_that_are_not_converted_stay_in_the_dtype(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "tiny", "glm-5.1", fp8=True)
    config = json.loads((folder / "config.json").read_text())
    before = ask_tiny(folder).weights.total
    config["quantization_config"]["modules_to_not_convert"] = ["o_proj"]
    (folder / "config.json").write_text(json.dumps(config))
    outputs = config["num_hidden_layers"] * 64 * 160  # [hidden, heads * v_head_dim]
    scales = config["num_hidden_layers"] * 2 * 5 * 4
    assert ask_tiny(folder).weights.total == before + 3 * outputs - scales


@pytest.mark.parametrize("names", ["o_proj", [7], [""]], ids=str)
def test_modules_that_are_not_converted_are_a_list_of_names(names: object, tmp_path: Path) -> None:
    folder = write_family(tmp_path / "tiny", "glm-5.1", fp8=True)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = names
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="modules_to_not_convert must be a list of names"):
        ask_tiny(folder)


@pytest.mark.parametrize(
    ("name", "billions"), [("glm-5.1", 743.9), ("deepseek-v3.2", 671.9)]
)  # published: 744B and 671B, each without the layer for speculation
def test_parameters_of_published_models(name: str, billions: float) -> None:
    assert round(ask_named(name).weights.num_parameters / 1e9, 1) == billions


def test_attention_is_on_every_gpu_or_divided() -> None:
    weights = weight_bytes(ask_named().model)
    assert 0.01 < weights.attention / weights.total < 0.02
    assert weights.per_gpu(1, data_parallel=True) == weights.per_gpu(1, data_parallel=False) == weights.total
    assert weights.per_gpu(8, data_parallel=False) == -(-weights.total // 8)
    each = weights.per_gpu(8, data_parallel=True)
    assert 0 <= 8 * each - (weights.total + 7 * weights.attention) < 8


def test_another_total_keeps_the_shares() -> None:
    weights = weight_bytes(ask_named().model).scaled_to(400 * 10**9)
    assert weights.total == 400 * 10**9
    assert 0.01 < weights.attention / weights.total < 0.02
