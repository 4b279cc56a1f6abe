"""The kernels compile without a GPU, for every architecture and record size class, and spill nothing."""

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from hisparse.kernels import build as build_module
from hisparse.kernels.attend_latent import shared_bytes
from hisparse.kernels.build import Build, BuildError, architecture_name, build
from hisparse.kernels.index_scores import THREADS as INDEX_THREADS
from hisparse.kernels.params import (
    AttendLatentParams,
    CopyParams,
    IndexScoresParams,
    InsertParams,
    MergeLatentParams,
    RebuildOrderParams,
    ReleaseParams,
    ResolveParams,
    TopKParams,
)
from hisparse.kernels.resolve import IN_FLIGHT
from hisparse.kernels.state import NUM_BINS


def nvrtc_is_installed() -> bool:
    try:
        build_module._nvrtc()
    except BuildError:
        return False
    return True


if not nvrtc_is_installed() and not os.environ.get("CI"):  # in CI its absence is a failure of every test here
    pytest.skip("needs NVRTC: pip install cuda-bindings nvidia-cuda-nvrtc", allow_module_level=True)

REGISTERS = 64 * 1024  # of a multiprocessor
ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a")
RECORD_SIZES = (16, 48, 656, 1152, 2048, 8192)
SOURCES: list[tuple[str, type[ctypes.Structure], dict[str, int]]] = [
    *(
        ("resolve.cu", ResolveParams, {"RECORD_BYTES": size, "IO": io, "IN_FLIGHT": IN_FLIGHT})
        for size in RECORD_SIZES
        for io in (0, 1)
    ),
    *(("copy.cu", CopyParams, {"RECORD_BYTES": size}) for size in RECORD_SIZES),
    ("insert.cu", InsertParams, {}),
    ("release.cu", ReleaseParams, {}),
    ("rebuild_order.cu", RebuildOrderParams, {"BINS": NUM_BINS}),
    ("top_k.cu", TopKParams, {}),
    ("merge_latent.cu", MergeLatentParams, {}),
    *(
        ("index_scores.cu", IndexScoresParams, {"FP8": fp8, "HEADS": heads, "HEAD_DIM": dim, "THREADS": INDEX_THREADS})
        for fp8, heads, dim in (
            (0, 8, 32),
            (0, 24, 128),
            (0, 32, 128),
            (0, 64, 128),
            (0, 96, 96),
            (0, 128, 128),
            (1, 32, 128),
            (1, 64, 128),
            (1, 128, 64),
            (1, 128, 128),
        )
    ),
]
THREADS = {"index_scores": INDEX_THREADS, "attend_latent": 256}  # threads a block, where they are fewer than 1024


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HISPARSE_CACHE", str(tmp_path))
    return tmp_path / "kernels"


def build_one(source: str, params: type[ctypes.Structure], defines: dict[str, int], architecture: str) -> Build:
    return build(source, {"PARAMS_BYTES": ctypes.sizeof(params), **defines}, architecture)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("source", "params", "defines"), SOURCES, ids=str)
def test_compiles_without_spills(
    source: str,
    params: type[ctypes.Structure],
    defines: dict[str, int],
    architecture: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    built = build_one(source, params, defines, architecture)
    assert built.resources, built.log
    assert "C7510" not in built.log, "the matrix unit's products are serialised"
    for name, resources in built.resources.items():
        size = f" of {defines['RECORD_BYTES']} B records" if "RECORD_BYTES" in defines else ""
        with capsys.disabled():
            print(f"\n{architecture} {name}{size}: {resources}", end="")
        assert resources.spill_bytes == 0, name
        threads = THREADS.get(name, 1024)
        assert resources.registers * threads <= REGISTERS, f"{name} cannot have {threads} threads a block"


@pytest.mark.parametrize("fp8", [0, 1])
def test_attention_compiles_for_hopper_without_spills(fp8: int) -> None:
    defines = {"FP8": fp8, "SHARED_BYTES": shared_bytes(bool(fp8))}
    built = build_one("attend_latent.cu", AttendLatentParams, defines, "sm_90a")
    resources = built.resources["attend_latent"]
    assert resources.spill_bytes == 0
    assert resources.registers * THREADS["attend_latent"] <= REGISTERS
    assert shared_bytes(bool(fp8)) <= 227 * 1024, "more than a block may have"
    assert "C7510" not in built.log, "the matrix unit's products are serialised"


def test_a_second_build_comes_from_disk(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build_one("release.cu", ReleaseParams, {}, "sm_90a")
    monkeypatch.setattr(build_module, "_compile", lambda *_: pytest.fail("compiled again"))
    assert build_one("release.cu", ReleaseParams, {}, "sm_90a") == first
    assert sorted(path.suffix for path in own_folder.iterdir()) == [".cubin", ".log"]


def test_a_build_that_is_interrupted_leaves_nothing(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(KeyboardInterrupt):
        build_one("release.cu", ReleaseParams, {}, "sm_90a")
    assert list(own_folder.iterdir()) == []


def test_definitions_and_architecture_are_part_of_the_name(own_folder: Path) -> None:
    for size in (16, 32):
        build_one("copy.cu", CopyParams, {"RECORD_BYTES": size}, "sm_90a")
    build_one("copy.cu", CopyParams, {"RECORD_BYTES": 16}, "sm_80")
    assert len(list(own_folder.glob("*.cubin"))) == 3


def test_a_struct_of_another_size_does_not_compile() -> None:
    with pytest.raises(BuildError, match="mirrors this struct"):
        build("release.cu", {"PARAMS_BYTES": 8}, "sm_90a")


def test_architectures() -> None:
    assert [architecture_name(*version) for version in ((8, 0), (8, 9), (9, 0), (10, 0))] == [
        "sm_80",
        "sm_89",
        "sm_90a",
        "sm_100a",
    ]
    with pytest.raises(BuildError, match=r"compute capability 7\.5"):
        architecture_name(7, 5)


def test_a_missing_nvrtc_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    build_module._nvrtc.cache_clear()
    try:
        with pytest.raises(BuildError, match="pip install cuda-bindings"):
            build_module._nvrtc()
    finally:
        build_module._nvrtc.cache_clear()
