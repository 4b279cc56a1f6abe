"""`hisparse make-tiny`: every family loads, and what it refuses."""

from pathlib import Path

import pytest
import torch

from hisparse.checkpoint import load
from hisparse.checkpoint.folder import read_config, read_tensors
from hisparse.commands.main import main

NAMES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "deepseek-v3.2": "DeepseekV32ForCausalLM",
    "glm-5.1": "GlmMoeDsaForCausalLM",
    "glm-5.2": "GlmMoeDsaForCausalLM",
}


def run(*arguments: object) -> int | str | None:
    with pytest.raises(SystemExit) as left:
        main(["make-tiny", *map(str, arguments)])
    return left.value.code


@pytest.mark.parametrize("name", NAMES)
def test_every_name_loads(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "deep" / "tiny"
    assert run(name, folder) in (0, None)
    assert capsys.readouterr().out == f"{folder}\n"
    assert load(folder).model.config.architecture == NAMES[name]


def test_options(tmp_path: Path) -> None:
    assert run("glm-5.2", tmp_path, "--notation", "pattern", "--fp8", "--seed", 3) in (0, None)  # empty is enough
    config = read_config(tmp_path)
    assert config["index_topk_pattern"] == "FFFSSSFS"
    assert config["quantization_config"]["quant_method"] == "fp8"
    load(tmp_path)


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run("deepseek-v3.2", tmp_path / name, "--seed", seed)
    first, same, other = (read_tensors(tmp_path / name)["lm_head.weight"] for name in "abc")
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("gpt2", "new"), ("NAME", "llama, qwen2, qwen3, deepseek-v3.2, glm-5.1, glm-5.2", "gpt2")),
        (("llama", "full"), ("DIR must be empty", "full")),
        (("glm-5.1", "full"), ("DIR must be empty", "full")),
        (("llama", "full/file"), ("is a file",)),
        (("llama", "full/file/below"), ("cannot be written",)),
        (("glm-5.1", "new", "--notation", "types"), ("--notation is for glm-5.2",)),
        (("glm-5.2", "new", "--notation", "stars"), ("types, pattern, pattern-list, frequency", "stars")),
        (("glm-5.2", "new", "--notation", ""), ("types, pattern, pattern-list, frequency", "got ''")),
        (("glm-5.2", "new", "--seed", str(10**22)), ("--seed must be from", str(2**64 - 1), str(10**22))),
        (("llama", "new", "--fp8"), ("--fp8 is for deepseek-v3.2",)),
    ],
    ids=str,
)
def test_refused(
    arguments: tuple[str, ...], words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    name, folder, *options = arguments
    assert run(name, tmp_path / folder, *options) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert message.count("\n") == 1
    for word in words:
        assert word in message
    assert (tmp_path / "full" / "file").read_text() == "mine"
    assert not (tmp_path / "new").exists()
