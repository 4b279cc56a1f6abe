"""GPUs, their driver, host memory, and the link between the two, measured."""

import shutil
import statistics
import subprocess
import time
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hisparse.doctor.finding import Finding, Status
from hisparse.host_memory import allocate, memory_report, size
from hisparse.kernels.build import OLDEST_ARCHITECTURE

GIB = 1 << 30
COPIES = 5  # in each direction; the median counts
CUDA_TORCH = (
    "pip install --force-reinstall torch --index-url <CUDA build, see https://pytorch.org/get-started/locally/>"
)


class Cuda(NamedTuple):
    """Whether torch can use a GPU, and what it complains about."""

    available: bool
    complaint: str | None


def look_for_cuda() -> Cuda:
    """Ask torch, which warns rather than raises where an installation is broken."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    complaint = str(caught[0].message).splitlines()[0] if caught else None
    return Cuda(available, complaint)


def gpus() -> Iterator[Finding]:
    """Every GPU that torch can use, named as torch names it."""
    cuda = look_for_cuda()
    if not cuda.available:
        yield _no_gpu(cuda)
        return
    for index in range(torch.cuda.device_count()):
        yield gpu(index)


def _no_gpu(cuda: Cuda) -> Finding:
    seen = nvidia_smi("name")
    if seen and torch.version.cuda is None:
        return Finding("GPU", Status.MISSING, f"{seen[0]} is here, but this torch is a CPU build", CUDA_TORCH)
    if seen or cuda.complaint:
        what = seen[0] if seen else "a GPU or a part of one's driver"
        says = f"{what} is here, but torch cannot use it: {cuda.complaint or 'it does not say why'}"
        return Finding("GPU", Status.MISSING, says, "update the NVIDIA driver, or install a torch for an older CUDA")
    return Finding("GPU", Status.NOTE, "none: the CPU backend is used")


def gpu(index: int) -> Finding:
    """One GPU: name, compute capability, memory."""
    name, (major, minor) = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    free, total = torch.cuda.mem_get_info(index)
    new_enough = major * 10 + minor >= OLDEST_ARCHITECTURE
    says = f"{name}, compute capability {major}.{minor}, {size(free)} of {size(total)} free"
    if not new_enough:
        says += "; the kernels need 8.0 (A100) or newer, so the CPU backend is used"
    values = {"device": name, "capability": f"{major}.{minor}", "free_bytes": free, "total_bytes": total}
    return Finding(f"cuda:{index}", Status.OK if new_enough else Status.NOTE, says, values=values)


def driver() -> Iterator[Finding]:
    """The NVIDIA driver, as nvidia-smi reports it."""
    versions = nvidia_smi("driver_version")
    if versions:
        yield Finding("driver", Status.OK, f"NVIDIA {versions[0]}", values={"version": versions[0]})
    elif look_for_cuda().available:
        yield Finding("driver", Status.NOTE, "works, but nvidia-smi does not tell its version")
    else:
        yield Finding("driver", Status.NOTE, "no NVIDIA driver answers; needed for a GPU only")


def nvidia_smi(what: str) -> list[str]:
    """A property of each GPU; none where the program is missing or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={what}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.split("\n")[:-1] if done.returncode == 0 else []


def host_memory() -> Iterator[Finding]:
    """How much a host pool can have, and how much of it can be pinned."""
    report = memory_report()
    values = {f"{name}_bytes": value for name, value in report._asdict().items()}
    yield Finding("host memory", Status.OK, str(report), values=values)


def link() -> Iterator[Finding]:
    """The speed of pinning and of plain copies over the link: the most that fetching can reach."""
    if not look_for_cuda().available:
        yield Finding("link", Status.NOTE, "not measured without a GPU")
        return
    num_bytes = measured_bytes()
    start = time.perf_counter()
    host = allocate((num_bytes,), pinned=True)
    pinning = num_bytes / (time.perf_counter() - start) / 1e9
    device = torch.empty(num_bytes, dtype=torch.uint8, device="cuda:0")
    there, back = copy_rate(host, device), copy_rate(device, host)
    says = f"{there:.1f} GB/s to cuda:0, {back:.1f} GB/s back ({size(num_bytes)}); pinning {pinning:.1f} GB/s"
    values = {"to_device_gb_s": there, "to_host_gb_s": back, "pinning_gb_s": pinning, "copied_bytes": num_bytes}
    yield Finding("link", Status.OK, says, values=values)


def measured_bytes() -> int:
    """1 GiB; a quarter where less than 4 GiB is free on the GPU or on the host."""
    free, _ = torch.cuda.mem_get_info(0)
    available = memory_report().available
    least = free if available is None else min(free, available)
    return GIB if least >= 4 * GIB else GIB // 4


def copy_rate(source: Tensor, target: Tensor) -> float:
    """GB/s of a plain copy on cuda:0, the median of a few after one that warms up."""
    with torch.cuda.device(0):
        target.copy_(source, non_blocking=True)
        return statistics.median(_one_copy(source, target) for _ in range(COPIES))


def _one_copy(source: Tensor, target: Tensor) -> float:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    target.copy_(source, non_blocking=True)
    last.record()
    last.synchronize()
    return float(source.numel() / first.elapsed_time(last) / 1e6)
