"""`hisparse doctor` on machines where something is missing or broken, which it says and does not mind."""

import errno
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hisparse.commands.main import main
from hisparse.doctor import examination, machine, software
from hisparse.doctor.finding import Finding, Status
from hisparse.host_memory import MemoryReport
from hisparse.kernels import build as build_module
from hisparse.kernels.build import BuildError
from tests.commands.test_commands import Run

NAMES = ("hisparse", "Python", "torch", "GPU", "driver", "NVRTC", "kernel", "kernel cache", "host memory", "link")


@pytest.fixture(autouse=True)
def _own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HISPARSE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "nvidia_smi", lambda what: [])


@pytest.fixture
def no_bindings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("cuda.bindings", "cuda.bindings.driver", "cuda.bindings.nvrtc"):
        monkeypatch.setitem(sys.modules, name, None)
    caches = (build_module._nvrtc, build_module._nvrtc_version)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def quick_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "compile_seconds", lambda architecture: 0.5)


def found(run: Run) -> dict[str, dict[str, Any]]:
    findings: list[dict[str, Any]] = run.json()["findings"]
    return {finding["name"]: finding for finding in findings}


@pytest.mark.usefixtures("no_gpu")
def test_lines_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(capsys, "doctor")
    assert run.code == 0
    lines = run.out.splitlines()
    assert [name for name in NAMES if not any(line[9:].startswith(name) for line in lines)] == []
    assert lines[-1] == "ok       backend       reference on the CPU: everything works, only slower"
    assert not (tmp_path / "cache").exists()


@pytest.mark.usefixtures("no_gpu", "quick_kernel")
def test_json_has_the_documented_keys(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(capsys, "doctor", "--json")
    findings = run.json()["findings"]
    assert run.code == 0
    assert tuple(finding["name"] for finding in findings) == (*NAMES, "backend")
    for finding in findings:
        assert set(finding) == {"name", "status", "says", "fix", "values"}
        assert finding["status"] in ("ok", "missing", "note")
        assert "\n" not in finding["says"]
    assert findings[-1]["values"] == {"backend": "reference", "device": "cpu"}
    assert set(found(run)["host memory"]["values"]) == {"available_bytes", "cgroup_left_bytes", "lock_limit_bytes"}


@pytest.mark.usefixtures("no_gpu", "no_bindings")
def test_missing_bindings_come_with_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(capsys, "doctor", "--json")
    assert run.code == 0
    for name in ("NVRTC", "kernel"):
        assert found(run)[name]["status"] == "missing"
        assert found(run)[name]["fix"] == "pip install cuda-bindings nvidia-cuda-nvrtc"
    assert found(run)["backend"]["status"] == "ok"


@pytest.mark.usefixtures("no_gpu", "no_bindings")
def test_what_to_do_stands_under_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Run(capsys, "doctor").out.splitlines()
    at = next(index for index, line in enumerate(lines) if line.startswith("missing  NVRTC"))
    assert lines[at + 1].strip() == "fix: pip install cuda-bindings nvidia-cuda-nvrtc"


@pytest.mark.usefixtures("no_gpu", "quick_kernel")
def test_an_unwritable_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("HISPARSE_CACHE", str(tmp_path / "file" / "cache"))
    run = Run(capsys, "doctor", "--json")
    assert run.code == 0
    finding = found(run)["kernel cache"]
    assert (finding["status"], finding["values"]["writable"]) == ("missing", False)
    assert "HISPARSE_CACHE" in finding["fix"]


def test_what_the_cache_folder_holds(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "kernels"
    folder.mkdir(parents=True)
    (folder / "a.cubin").write_bytes(bytes(3000))
    (finding,) = software.kernel_cache()
    assert finding.values == {"folder": str(folder), "writable": True, "files": 1, "kept_bytes": 3000}


def test_the_compile_is_timed_apart_from_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Path] = []

    def build(*_: object) -> None:
        seen.append(build_module._folder())

    monkeypatch.setattr(build_module, "build", build)
    assert software.compile_seconds("sm_90a") >= 0
    assert tmp_path not in seen[0].parents
    assert build_module._folder() == tmp_path / "cache" / "kernels"


@pytest.mark.usefixtures("no_gpu", "quick_kernel")
def test_a_look_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> None:
        raise OSError("libcuda.so.1: wrong ELF class\nand more")

    monkeypatch.setattr(torch.cuda, "is_available", broken)
    run = Run(capsys, "doctor", "--json")
    assert run.code == 0
    assert found(run)["GPU"]["says"] == "could not be looked at (OSError: libcuda.so.1: wrong ELF class)"
    assert "Traceback" not in run.err


@pytest.mark.usefixtures("no_gpu", "quick_kernel")
def test_a_torch_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "hisparse.doctor.machine")
    run = Run(capsys, "doctor", "--json")
    assert run.code == 0
    assert {found(run)[name]["status"] for name in ("torch", "GPU", "link", "backend")} == {"missing"}
    assert "pip install torch" in found(run)["torch"]["fix"]


@pytest.mark.parametrize(
    ("seen", "cuda", "complaint", "status", "words"),
    [
        ([], None, None, Status.NOTE, "none: the CPU backend is used"),
        (["NVIDIA H200"], None, None, Status.MISSING, "NVIDIA H200 is here, but this torch is a CPU build"),
        (
            ["NVIDIA H200"],
            "13.0",
            "driver too old",
            Status.MISSING,
            "NVIDIA H200 is here, but torch cannot use it: dri",
        ),
        ([], "13.0", "driver too old", Status.MISSING, "torch cannot use it: driver too old"),
    ],
)
def test_why_there_is_no_gpu(
    seen: list[str],
    cuda: str | None,
    complaint: str | None,
    status: Status,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "nvidia_smi", lambda what: seen)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(machine, "look_for_cuda", lambda: machine.Cuda(False, complaint))
    (finding,) = machine.gpus()
    assert finding.status is status
    assert words in finding.says


@pytest.mark.parametrize(("capability", "status"), [((9, 0), Status.OK), ((7, 5), Status.NOTE)])
def test_a_gpu_and_the_backend_that_follows(
    capability: tuple[int, int], status: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "look_for_cuda", lambda: machine.Cuda(True, None))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA Test")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (3 << 30, 4 << 30))
    monkeypatch.setattr(software, "compile_seconds", lambda architecture: 0.5)
    monkeypatch.setattr(software, "_load_kernel", lambda: True)
    (gpu,), (kernel,) = machine.gpus(), software.kernel()
    assert (gpu.name, gpu.status, kernel.status) == ("cuda:0", status, status)
    assert "3.00 GiB of 4.00 GiB free" in gpu.says
    fine = [Finding(name, Status.OK, "") for name in ("torch", "NVRTC")]
    expected = "kernels" if status is Status.OK else "reference"
    assert examination.backend([*fine, gpu, kernel]).values["backend"] == expected


def test_a_kernel_that_compiles_and_does_not_load(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> bool:
        raise BuildError("the CUDA driver refused to load a cubin: CUDA_ERROR_UNSUPPORTED_PTX_VERSION")

    monkeypatch.setattr(software, "compile_seconds", lambda architecture: 0.5)
    monkeypatch.setattr(software, "_load_kernel", fail)
    (finding,) = software.kernel()
    assert (finding.status, finding.fix) == (Status.MISSING, software.NEW_DRIVER)
    assert "compiles but does not load" in finding.says


def test_a_kernel_that_does_not_compile(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(architecture: str) -> float:
        raise BuildError("resolve.cu did not compile with NVRTC 11.0: NVRTC_ERROR\nlog")

    monkeypatch.setattr(software, "compile_seconds", fail)
    (finding,) = software.kernel()
    assert (finding.status, finding.fix) == (Status.MISSING, None)
    assert "did not compile with NVRTC 11.0" in finding.says


class FakeEvent:
    """An event of a copy that takes 20 ms."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, last: "FakeEvent") -> float:
        return 20.0


class OnDevice:
    """`torch.cuda.device` where there is none."""

    def __init__(self, index: int) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def test_the_link_is_measured_with_less_where_little_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    monkeypatch.setattr(machine, "look_for_cuda", lambda: machine.Cuda(True, None))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: ((4 << 30) - 1, 8 << 30))
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "device", OnDevice)
    monkeypatch.setattr(machine, "GIB", 4 << 30)
    monkeypatch.setattr(machine, "allocate", lambda shape, pinned: empty(64, dtype=torch.uint8))
    monkeypatch.setattr(torch, "empty", lambda num_bytes, dtype, device: empty(64, dtype=dtype))
    (finding,) = machine.link()
    assert finding.values["copied_bytes"] == 1 << 30
    assert finding.values["to_device_gb_s"] == finding.values["to_host_gb_s"] == 64 / 20 / 1e6
    assert "GB/s to cuda:0" in finding.says


def test_bytes_to_measure_with(monkeypatch: pytest.MonkeyPatch) -> None:
    for free, available, expected in (
        (4 << 30, None, 1 << 30),
        ((4 << 30) - 1, None, 256 << 20),
        (8 << 30, 2 << 30, 256 << 20),
        (8 << 30, 8 << 30, 1 << 30),
    ):
        report = MemoryReport(available, None, None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index, free=free: (free, 8 << 30))
        monkeypatch.setattr(machine, "memory_report", lambda report=report: report)
        assert machine.measured_bytes() == expected


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(capsys, "doctor", "--help")
    assert run.code == 0
    assert "what this machine can do" in run.out


def test_a_closed_pipe_is_no_failure_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(result: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("hisparse.commands.doctor.print_json", write)
    monkeypatch.setattr("sys.stdout", io.StringIO())  # which typer puts away
    monkeypatch.setattr("sys.stderr", io.StringIO())
    with pytest.raises(SystemExit) as left:
        main(["doctor", "--json"])
    assert left.value.code == 141
