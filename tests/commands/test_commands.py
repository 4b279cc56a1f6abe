"""The command line as a user meets it: what it prints, and how it leaves."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hisparse.cache import HierarchicalCache
from hisparse.checkpoint.tiny import write_tiny
from hisparse.checkpoint.tiny_mla import write_tiny_mla
from hisparse.commands.main import main
from hisparse.engine import Engine

TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 12
SMALL = ("--top-k", "64", "--device-buffer-size", "128")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"), max_positions=2048)


@pytest.fixture(autouse=True)
def _own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HISPARSE_CACHE", str(tmp_path / "cache"))


class Run:
    """Runs a command in this process and keeps what it did."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *arguments: object) -> None:
        with pytest.raises(SystemExit) as left:
            main([str(argument) for argument in arguments])
        self.code = left.value.code or 0
        self.out, self.err = capsys.readouterr()

    def json(self) -> dict[str, Any]:
        assert self.out.count("\n") == 1
        found: dict[str, Any] = json.loads(self.out)
        return found


def test_generate_streams_text_and_ends_with_statistics(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(capsys, "generate", tiny, "-p", TEXT, "--max-tokens", 12, *SMALL)
    assert run.code == 0
    assert run.out.strip()
    for words in ("context length", "full KV", "slots + workspace", "selection state", "hit rate", "tokens/s"):
        assert words in run.err


def test_generate_json(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(capsys, "generate", tiny, "-p", TEXT, "-p", "short", "--max-tokens", 12, *SMALL, "--json")
    result = run.json()
    assert run.code == 0
    assert [len(output["tokens"]) for output in result["outputs"]] == [12, 12]
    assert result["device_kv_bytes"] == result["slots_bytes"] + result["workspace_bytes"]


def test_quest_reads_whole_pages_and_says_so(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(capsys, "generate", tiny, "-p", TEXT, "--top-k", 47, "--max-tokens", 2, "--json")
    assert "top_k 47: Quest reads whole pages of 16 tokens, so layers read 32" in run.err
    assert run.json()["top_k"] == 32


def test_seed_makes_sampling_repeatable(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--temperature", 1.5, "--max-tokens", 20, "--json", *SMALL)
    texts = [
        Run(capsys, "generate", tiny, "-p", TEXT, *options, "--seed", seed).json()["outputs"][0]["tokens"]
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_several_prompts_are_printed_apart(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(TEXT, encoding="utf-8")
    run = Run(capsys, "generate", tiny, "-f", file, "-p", "b", "--max-tokens", 4, "--no-stats", *SMALL)
    assert run.code == 0
    assert "--- prompt 1 (length)" in run.out
    assert "--- prompt 2" in run.out


def test_verify_prints_one_object_and_leaves_with_0(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(TEXT, encoding="utf-8")
    run = Run(capsys, "verify", tiny, "--prompt-file", file, *SMALL, "--max-tokens", 40, "--json")
    result = run.json()
    assert run.code == 0
    assert result["equal"] is True
    assert result["steps"] == 40
    assert 0 < result["miss_rate"] < 1
    assert result["device_kv_bytes"] > 0
    assert result["full_kv_bytes"] > 0
    assert 0 <= result["dense_top_token_agreement"] <= 1


def test_verify_leaves_with_1_if_a_slot_was_wrong(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = HierarchicalCache.resolve

    def off_by_one(cache: HierarchicalCache, layer: int, *given: Any) -> torch.Tensor:
        slots = resolve(cache, layer, *given)
        return torch.where(slots > 0, slots - 1, slots)

    monkeypatch.setattr(HierarchicalCache, "resolve", off_by_one)
    run = Run(capsys, "verify", tiny, "-p", TEXT, *SMALL, "--max-tokens", 4)
    assert run.code == 1
    assert "NOT equal" in run.out
    assert "first difference: request 0, position" in run.out


def bad_inputs(tiny: Path, tmp_path: Path) -> dict[str, tuple[list[object], tuple[str, ...]]]:
    """What is wrong -> (arguments after `generate`, words that the message must have)."""
    (tmp_path / "latin1.txt").write_bytes("caf\xe9".encode("latin-1"))
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "broken.json").write_text("{top_k: 3}")
    long = "x" * 5000
    return {
        "missing checkpoint": (["/nowhere/model", "-p", "a"], ("/nowhere/model",)),
        "no prompt": ([tiny], ("--prompt",)),
        "empty prompt": ([tiny, "-p", " "], ("empty",)),
        "empty file": ([tiny, "-f", tmp_path / "empty.txt"], ("empty",)),
        "missing file": ([tiny, "-f", tmp_path / "none.txt"], ("none.txt",)),
        "invalid UTF-8": ([tiny, "-f", tmp_path / "latin1.txt"], ("not UTF-8", "0xe9", "offset 3")),
        "B not above top_k": (
            [tiny, "-p", "a", "--top-k", 64, "--device-buffer-size", 64],
            ("device_buffer_size", "64", "65"),
        ),
        "top_k below a page": ([tiny, "-p", "a", "--top-k", 8], ("top_k", "16", "8")),
        "prompt beyond the context": ([tiny, "-p", long], ("2048", "shorten")),
        "prompt that never fits": (
            [tiny, "-p", TEXT, *SMALL, "--hisparse-config", '{"host_to_device_ratio": 0.5}'],
            ("can never fit", "256 rows"),
        ),
        "unknown key": ([tiny, "-p", "a", "--hisparse-config", '{"topk": 64}'], ("'topk'", "'top_k'")),
        "broken JSON": ([tiny, "-p", "a", "--hisparse-config", tmp_path / "broken.json"], ("not valid JSON",)),
        "unknown policy": ([tiny, "-p", "a", "--policy", "lur"], ("'lur'", "'lru'")),
        "unknown selector": ([tiny, "-p", "a", "--selector", "best"], ("'best'", "quest")),
        "unknown dtype": ([tiny, "-p", "a", "--dtype", "int8"], ("int8", "float32")),
        "unknown device": ([tiny, "-p", "a", "--device", "gpu"], ("gpu", "cpu")),
        "a device that is not supported": ([tiny, "-p", "a", "--device", "meta"], ("--device", "'meta'", "cuda")),
        "negative temperature": ([tiny, "-p", "a", "--temperature", -1], ("temperature", "-1")),
        "top_p of 0": ([tiny, "-p", "a", "--top-p", 0], ("top_p", "0")),
        "no tokens": ([tiny, "-p", "a", "--max-tokens", 0], ("max_tokens", "0")),
        "all with a short top_k": (
            [tiny, "-p", TEXT, "--selector", "all", *SMALL],
            ("top_k 64", "raise top_k"),
        ),
    }


CASES = (
    "missing checkpoint",
    "a device that is not supported",
    "no prompt",
    "empty prompt",
    "empty file",
    "missing file",
    "invalid UTF-8",
    "B not above top_k",
    "top_k below a page",
    "prompt beyond the context",
    "prompt that never fits",
    "unknown key",
    "broken JSON",
    "unknown policy",
    "unknown selector",
    "unknown dtype",
    "unknown device",
    "negative temperature",
    "top_p of 0",
    "no tokens",
    "all with a short top_k",
)


@pytest.mark.parametrize("case", CASES)
def test_bad_input_gets_a_message_and_2(
    case: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, words = bad_inputs(tiny, tmp_path)[case]
    run = Run(capsys, "generate", *arguments)
    assert run.code == 2
    assert run.out == ""
    assert "Traceback" not in run.err
    message = run.err.splitlines()[-1]
    assert message.startswith("error: ")
    for word in words:
        assert word in message


def test_nan_logits_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny(tmp_path / "nan", max_positions=256)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    run = Run(capsys, "generate", folder, "-p", "hello", *SMALL)
    assert run.code == 2
    assert "NaN" in run.err


def test_verify_refuses_a_damaged_scale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny_mla(tmp_path / "nan", "glm-5.2", fp8=True, notation="pattern")
    weights, name = load_file(folder / "model.safetensors"), "model.layers.1.mlp.experts.0.down_proj.weight_scale_inv"
    weights[name][0, 0] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    run = Run(capsys, "verify", folder, "-p", "hello", *SMALL, "--json")
    assert run.code == 2
    assert run.out == ""
    assert run.err.splitlines()[-1].startswith(f"error: {folder}: {name} must be finite and not negative, got nan")


def test_truncated_checkpoint_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny(tmp_path / "short")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    run = Run(capsys, "generate", folder, "-p", "hello")
    assert run.code == 2
    assert "model.safetensors" in run.err


def test_unsupported_architecture_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny(tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["MambaForCausalLM"]}))
    run = Run(capsys, "generate", folder, "-p", "hello")
    assert run.code == 2
    for name in ("MambaForCausalLM", "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        assert name in run.err


def test_interrupt_ends_cleanly(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(engine: Engine) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "step", interrupt)
    run = Run(capsys, "generate", tiny, "-p", "hello", *SMALL)
    assert run.code == 130
    assert run.err.splitlines()[-1] == "interrupted"


def test_usage_error_leaves_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert Run(capsys, "generate").code == 2
    assert Run(capsys, "no-such-command").code == 2


@pytest.mark.parametrize("command", ["demo", "fetch", "generate", "verify", "bench"])
def test_help_of_every_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(capsys, command, "--help")
    assert run.code == 0
    assert "Usage" in run.out
