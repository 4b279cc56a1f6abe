"""`hisparse plan`: what it prints, what it refuses, and how it leaves."""

import json
import math
import shlex
from pathlib import Path

import numpy as np
import pytest

from hisparse.checkpoint import load
from hisparse.checkpoint.tiny import write_tiny
from hisparse.checkpoint.tiny_mla import write_tiny_mla
from hisparse.commands.options import build_config
from hisparse.engine import build_engine
from hisparse.engine.family import state_of
from tests.checkpoint.test_folder import rewrite_config
from tests.checkpoint.test_gguf import converted, write_gguf
from tests.commands.test_commands import Run

H200S = ("--device-memory", "141GB", "--host-memory", "2TB", "--gpus", "8")
GLM = ("glm-5.1", *H200S, "--context", "128K")
SMALL_H200S = ("--device-memory", "113GB")
FP8_KEYS = ("--hisparse-config", '{"index_cache_dtype": "fp8"}')


def plan(capsys: pytest.CaptureFixture[str], *arguments: object) -> Run:
    return Run(capsys, "plan", *arguments)


@pytest.mark.parametrize("name", ["glm-5.1", "glm-5.2", "deepseek-v3.2"])
def test_models_by_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = plan(capsys, name, *H200S, "--json")
    result = run.json()
    assert run.code == 0
    assert run.err == ""
    assert result["model"] == name
    assert [option["device_buffer_size"] for option in result["hierarchical"]] == [4096, 6144, 8192]
    build_config(json.dumps(result["recommended"]))


def test_figures_of_glm_5_1(capsys: pytest.CaptureFixture[str]) -> None:
    result = plan(capsys, *GLM, *FP8_KEYS, "--json").json()
    assert result["recommended"]["index_cache_dtype"] == "fp8"
    assert result["with_fp8_index_keys"] is None
    assert result["context"] == 131_072
    assert result["bytes_per_token"] == {"records": 89_856, "selection_state": 10_296, "tables": 312}
    assert result["resident"]["requests"] == 16
    first = result["hierarchical"][0]
    assert first["slots_bytes_per_request"] == 368_050_176
    assert first["requests"] == 8 * first["requests_per_gpu"] > 100
    assert first["limited_by"] == "selection_state"
    assert first["miss_rate"] == pytest.approx(0.134)
    parts = ("device_kv_bytes", "table_bytes", "launch_bytes", "selection_state_bytes")
    assert first["cache"]["device_bytes"] == sum(first["cache"][part] for part in parts)
    assert first["cache"]["device_bytes"] <= result["cache_bytes_per_gpu"]


def test_tables_to_read(capsys: pytest.CaptureFixture[str]) -> None:
    run = plan(capsys, *GLM)
    assert run.code == 0
    for words in ("131,072 tokens", "78 layers x 1,152 B", "fully resident", "13.4%", "13.09 GB", "about 15"):
        assert words in run.out
    assert """--hisparse-config '{"top_k": 2048, "device_buffer_size": 4096, "max_running_requests": 9}'""" in run.out


def test_fp8_index_keys_are_proposed_where_keys_limit(capsys: pytest.CaptureFixture[str]) -> None:
    proposed = plan(capsys, *GLM, "--json").json()["with_fp8_index_keys"]
    assert proposed == {"device_buffer_size": 4096, "requests_per_gpu": 16, "requests": 128}
    (line,) = (line for line in plan(capsys, *GLM).out.splitlines() if "index keys limit" in line)
    assert "limit the requests to 9 a GPU" in line
    assert FP8_KEYS[1] in line
    assert line.endswith("there would be 16")


@pytest.mark.parametrize("keys", [(), FP8_KEYS], ids=["auto", "fp8 index keys"])
def test_the_plan_of_a_folder_is_what_the_engine_allocates(
    keys: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_tiny_mla(tmp_path / "tiny", "glm-5.2")
    machine = ("--device-memory", "8MB", "--host-memory", "3MB", "--context", "1K", "--dtype", "float32")
    result = plan(capsys, folder, *machine, *keys, "--json").json()
    command = shlex.split(result["serve"])
    assert command[:5] == ["hisparse", "serve", str(folder), "--max-context", "1024"]
    config = build_config(command[-1])
    assert config == build_config(json.dumps(result["recommended"]))
    cache = build_engine(load(folder), config, [1024] * config.max_running_requests).runner.cache
    sizes, state = result["recommended_cache"], state_of(cache)
    assert sizes["slots_bytes"] == cache.device_pool.records.nbytes
    assert sizes["host_bytes"] == cache.host_pool.records.nbytes <= 3_000_000
    assert sizes["selection_state_bytes"] == state.data.nbytes + state.page_table.nbytes
    assert sizes["table_bytes"] == cache.layout.table_bytes


def test_a_gguf_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny(tmp_path / "tiny")
    file = write_gguf(tmp_path / "tiny.gguf", "llama", converted(folder, "LlamaForCausalLM"))
    machine = ("--device-memory", "1GB", "--host-memory", "1GB", "--context", "1K", "--json")
    of_folder, of_file = (plan(capsys, model, *machine).json() for model in (folder, file))
    assert of_file.pop("serve") == of_folder.pop("serve").replace(str(folder), str(file))
    assert of_file | {"model": ""} == of_folder | {"model": ""}


def test_misses_of_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turns = np.arange(240).reshape(60, 1, 4) % 12
    np.save(tmp_path / "turns.npy", turns.astype(np.int32))
    result = plan(capsys, *GLM, "--trace", tmp_path / "turns.npy", "--json").json()
    assert result["miss_rates_from"] == "lru on the trace turns (k 4, 60 steps)"
    assert [option["miss_rate"] for option in result["hierarchical"]] == pytest.approx([1, 0, 0], abs=1e-5)


def test_a_folder_goes_before_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny_mla(tmp_path / "glm-5.1", "glm-5.1")
    monkeypatch.chdir(tmp_path)
    assert plan(capsys, "glm-5.1", "--device-memory", "1GB", "--host-memory", "1GB", "--json").json()["context"] == 4096


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            (*GLM, "--gpus", 4),
            ("weights take 197 GB", "134 GB usable", "--device-memory", "--gpus 7", "--weight-memory"),
        ),
        ((*GLM, "--host-memory", "20GB"), ("11.8 GB of host memory", "--host-memory 94.23GB", "--context 27776")),
        ((*GLM, *SMALL_H200S), ("107 GB usable", '"index_cache_dtype": "fp8" in --hisparse-config', "--context 87808")),
        ((*GLM, "--step-budget", 0.01), ("the step's budget", "--step-budget 0.235", "--link")),
    ],
    ids=["device", "host", "index keys", "budget"],
)
def test_when_nothing_fits_the_figures_come_first(
    arguments: tuple[object, ...], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    run = plan(capsys, *arguments, "--json")
    assert run.code == 2
    assert run.json()["recommended"] is None
    assert run.err.startswith("error: nothing fits")
    assert run.err.count("\n") == 1
    for word in words:
        assert word in run.err


def test_a_smaller_buffer_that_an_error_proposes_fits(capsys: pytest.CaptureFixture[str]) -> None:
    request = ("glm-5.1", *H200S, "--context", "8K", "--json", "--device-buffer-size")
    run = plan(capsys, *request, 1_000_000)
    assert run.code == 2
    assert "with --device-buffer-size 312740" in run.err
    assert plan(capsys, *request, 312_740).code == 0
    assert plan(capsys, *request, 312_741).code == 2


def test_a_default_buffer_is_not_proposed_smaller(capsys: pytest.CaptureFixture[str]) -> None:
    for size in ((), ("--device-buffer-size", 4096)):
        run = plan(capsys, *GLM, "--gpus", 4, *size)
        assert run.code == 2
        assert "--device-buffer-size" not in run.err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 1_000_000}, "num_hidden_layers must be at most 1,000"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps must be a finite number above 0, got nan"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.factor is missing"),
    ],
    ids=str,
)
def test_a_configuration_that_cannot_be(
    change: dict[str, object], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_tiny_mla(tmp_path / "tiny", "glm-5.1")
    rewrite_config(folder, change)
    run = plan(capsys, folder, "--device-memory", "1GB", "--host-memory", "1GB")
    assert run.code == 2
    assert run.err.startswith(f"error: config.json: {words}")
    assert run.err.count("\n") == 1


@pytest.mark.parametrize(
    "change",
    [("--device-memory", "210.31GB"), ("--gpus", 7), ("--weight-memory", "400GB")],
    ids=lambda change: change[0],
)
def test_what_an_error_proposes_fits(change: tuple[object, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(capsys, *GLM, "--gpus", 4, *change, "--json").code == 0


def test_index_keys_that_an_error_proposes_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(capsys, *GLM, *SMALL_H200S, *FP8_KEYS, "--json").code == 0


@pytest.mark.parametrize("change", [("--host-memory", "94.23GB"), ("--context", "27776")], ids=lambda change: change[0])
def test_what_an_error_proposes_for_the_host_fits(
    change: tuple[object, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(capsys, *GLM, "--host-memory", "20GB", *change, "--json").code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            (*GLM, "--context", "300K"),
            ("--context 307,200", "202,752 tokens that glm-5.1 can read", "--context 202752"),
        ),
        ((*GLM, "--context", "lots"), ("--context must be a number of tokens", "128K", "'lots'")),
        ((*GLM, "--context", "1"), ("--context must be at least 2", "got 1")),
        ((*GLM, "--device-memory", "141"), ("--device-memory must be a size", "141GB", "'141'")),
        ((*GLM, "--host-memory", "2XB"), ("--host-memory must be a size", "'2XB'")),
        ((*GLM, "--weight-memory", "much"), ("--weight-memory must be a size", "'much'")),
        ((*GLM, "--gpus", 0), ("--gpus must be from 1 to 4096", "got 0")),
        ((*GLM, "--memory-fraction", 1.5), ("--memory-fraction must be above 0 and at most 1", "1.5")),
        ((*GLM, "--link", 0), ("--link must be", "got 0")),
        ((*GLM, "--step-budget", "nan"), ("--step-budget must be", "nan")),
        ((*GLM, "--attention", "ep"), ("--attention must be one of auto, dp, tp", "'ep'")),
        (
            (*GLM, "--hisparse-config", '{"index_cache_dtype": "int4"}'),
            ("index_cache_dtype must be one of auto, fp8", "'int4'"),
        ),
        ((*GLM, "--trace", "missing.npy"), ("the trace missing.npy cannot be read",)),
        ((*GLM, "--dtype", "int8"), ("--dtype must be one of float32, bfloat16, float16", "'int8'")),
        ((*GLM, "--selector", "quest"), ("selector must be 'auto' or 'dsa'", "'quest'")),
        ((*GLM, "--device-buffer-size", 2048), ("device_buffer_size must be above top_k", "2049")),
        ((*GLM, "--hisparse-config", '{"host_to_device_ratio": 4}'), ("host_to_device_ratio", "--host-memory")),
        ((*GLM, "--hisparse-config", '{"topk": 4}'), ("unknown configuration key 'topk'", "top_k")),
        (("glm-5.9", *H200S), ("no model 'glm-5.9'", "glm-5.1")),
    ],
    ids=str,
)
def test_refused(arguments: tuple[object, ...], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    run = plan(capsys, *arguments)
    assert run.code == 2
    assert run.out == ""
    assert run.err.startswith("error: ")
    assert run.err.count("\n") == 1
    for word in words:
        assert word in run.err


def test_dense_selection_needs_top_k_for_the_whole_context(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = (write_tiny(tmp_path / "tiny"), "--device-memory", "1GB", "--host-memory", "1GB", "--context", "2K")
    run = plan(capsys, *machine, "--selector", "all")
    assert run.code == 2
    assert "--top-k must be the context, 2048, got 512" in run.err
    assert plan(capsys, *machine, "--selector", "all", "--top-k", 2048).code == 0


def test_index_keys_are_an_indexers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = (write_tiny(tmp_path / "tiny"), "--device-memory", "1GB", "--host-memory", "1GB")
    run = plan(capsys, *machine, *FP8_KEYS)
    assert run.code == 2
    assert "index_cache_dtype 'fp8' is for models with latent attention, and this is a LlamaForCausalLM" in run.err
