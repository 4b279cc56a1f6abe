"""Memory for the host pool: tens of GB, pinned quickly, or refused before any of it is taken.

Pinned memory is mapped with huge pages, touched by several threads and then registered with CUDA in one call, which
takes less than half the time of `pin_memory` and can report progress. Fed by the host pool; `hisparse doctor` prints
what is known here about the machine.
"""

import ctypes
import math
import mmap
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hisparse.errors import HostMemoryError

CHUNK_BYTES = 256 << 20  # touched between two reports of progress
MAX_THREADS = 8  # that touch; more do not help, since the kernel's page allocator is then the limit
MAP_NORESERVE = 0x4000  # Linux on x86 and ARM; Python has the name from 3.13 on
WAY_OUT = (
    "lower num_pages of the layout (host_to_device_ratio on the command line), the context length or the number of "
    "requests"
)

PROC = Path("/proc")
CONTROL_GROUPS = Path("/sys/fs/cgroup")
VIRTIO_DRIVERS = Path("/sys/bus/virtio/drivers")

Progress = Callable[[int, int], None]  # bytes done, bytes in all


class MemoryReport(NamedTuple):
    """What the system says about host memory, in bytes; None where it says nothing or sets no limit."""

    available: int | None  # to all processes, without swapping
    cgroup_left: int | None  # to this process in its control group
    lock_limit: int | None  # RLIMIT_MEMLOCK

    def __str__(self) -> str:
        known = (
            (self.available, "available"),
            (self.cgroup_left, "left in the control group"),
            (self.lock_limit, "may be locked (ulimit -l), which CUDA usually is not held to"),
        )
        return ", ".join(f"{size(value)} {what}" for value, what in known if value is not None) or "nothing is known"


def memory_report() -> MemoryReport:
    """What the system says now."""
    return MemoryReport(_available(), _cgroup_left(), _lock_limit())


def size(num_bytes: int) -> str:
    """Bytes in words, as GiB from a tenth of one on."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 // 10 else f"{num_bytes / 2**20:.2f} MiB"


def allocate(shape: Sequence[int], *, pinned: bool, progress: Progress | None = None) -> Tensor:
    """A uint8 tensor in host memory; its contents are undefined.

    Args:
        shape: its sizes, all positive.
        pinned: whether CUDA may read and write it directly; needs a GPU.
        progress: called with (bytes done, bytes in all) while pinned memory is made, in this thread.

    Raises:
        ValueError: a size is not positive.
        HostMemoryError: there is not so much memory, or it cannot be pinned. Nothing stays taken.
    """
    if not shape or min(shape) < 1:
        raise ValueError(f"shape must have positive sizes only, got {tuple(shape)}")
    num_bytes = math.prod(shape)
    if num_bytes > sys.maxsize:
        raise _refusal(num_bytes, "no address space is that large")
    if not pinned:
        return _pageable(shape, num_bytes)
    return torch.from_numpy(_pinned(num_bytes, progress)).view(*shape)


def _pageable(shape: Sequence[int], num_bytes: int) -> Tensor:
    try:
        return torch.empty(tuple(shape), dtype=torch.uint8, device="cpu")
    except RuntimeError as error:  # torch has no narrower class for a failing malloc
        raise _refusal(num_bytes, "the system refused it") from error


def _pinned(num_bytes: int, progress: Progress | None) -> NDArray[np.uint8]:
    runtime = torch.cuda.cudart()  # first: without a GPU this raises, and nothing has been taken
    _check_room(num_bytes)
    mapping = _map(num_bytes)
    try:
        _touch(mapping, progress)
        address = _register(runtime, mapping)
    except BaseException:
        mapping.close()  # now, not when the traceback goes
        raise
    memory = np.frombuffer(mapping, np.uint8)  # the tensor's storage owns it, and so do all views
    release = weakref.finalize(memory, _unregister, runtime, address, mapping)
    release.atexit = False  # CUDA may be gone by then, and the process's end unpins everything
    return memory


def _check_room(num_bytes: int) -> None:
    """Refuse what the control group would kill us for; warn about the rest.

    On some virtual machines memory appears as it is touched, so that the system says too little at first.
    """
    report = memory_report()
    if report.cgroup_left is not None and num_bytes > report.cgroup_left:
        raise _refusal(num_bytes, "the control group of this process (a container's limit) does not leave it that")
    if report.available is not None and num_bytes > report.available:
        warnings.warn(
            f"the host pool asks for {size(num_bytes)}, and the system says that {size(report.available)} are "
            f"available. If it has no more, the process may be killed: then {WAY_OUT}",
            stacklevel=2,
        )


def _refusal(num_bytes: int, why: str) -> HostMemoryError:
    return HostMemoryError(
        f"the host pool asks for {size(num_bytes)} of host memory, and {why}. Free: {memory_report()}. "
        f"Free some memory, or {WAY_OUT}"
    )


def _map(num_bytes: int) -> mmap.mmap:
    """Fresh pages that nothing has touched yet."""
    try:
        mapping = _anonymous(num_bytes)
    except (OSError, OverflowError, ValueError) as error:
        raise _refusal(num_bytes, f"the system refused to map it ({error})") from error
    _advise(mapping)
    return mapping


def _anonymous(num_bytes: int) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(-1, num_bytes)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared pages would be shmem's, which are rarely huge
    try:
        return mmap.mmap(-1, num_bytes, flags=flags)
    except OSError:
        if not _memory_can_grow():
            raise
        return mmap.mmap(-1, num_bytes, flags=flags | MAP_NORESERVE)


def _memory_can_grow() -> bool:
    """Whether this is a virtual machine that gets memory as it needs it.

    There Linux refuses to map more than it has at the moment, although more would come.
    """
    return any(any((VIRTIO_DRIVERS / driver).glob("virtio*")) for driver in ("virtio_mem", "virtio_balloon"))


def _advise(mapping: mmap.mmap) -> None:
    """Huge pages, four times faster to touch; no copies in forked children, which could not use CUDA anyway."""
    for name in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, name):
            with suppress(OSError):  # a kernel without the feature; the memory works all the same
                mapping.madvise(getattr(mmap, name))


def _touch(mapping: mmap.mmap, progress: Progress | None) -> None:
    """Make the system provide every page, with several threads."""
    total = len(mapping)
    starts = range(0, total, CHUNK_BYTES)
    threads = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1))
    try:
        for start, _ in zip(starts, threads.map(partial(_touch_chunk, mapping), starts), strict=True):
            if progress is not None:
                progress(min(start + CHUNK_BYTES, total), total)
    finally:
        threads.shutdown(cancel_futures=True)  # waits: nothing may touch what is about to be unmapped


def _touch_chunk(mapping: mmap.mmap, start: int) -> None:
    chunk = np.frombuffer(mapping, np.uint8, min(CHUNK_BYTES, len(mapping) - start), start)
    chunk[:: mmap.PAGESIZE] = 0  # numpy lets go of the interpreter's lock meanwhile


def _register(runtime: Any, mapping: mmap.mmap) -> int:
    """Pin the mapping; returns its address. No view of it outlives the call, so that it can be closed."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    result = runtime.cudaHostRegister(address, len(mapping), 0)
    if int(result):
        _forget_cuda_error()
        raise _refusal(len(mapping), f"CUDA refused to pin it ({runtime.cudaGetErrorString(result)})")
    return address


def _forget_cuda_error() -> None:
    """CUDA keeps the error of a failed call, and torch would raise it after the next kernel: let it do that here."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")


def _unregister(runtime: Any, address: int, mapping: mmap.mmap) -> None:
    """Unpin; `mapping` is an argument so that it cannot be unmapped before."""
    result = runtime.cudaHostUnregister(address)
    if int(result):
        reason = runtime.cudaGetErrorString(result)
        warnings.warn(f"CUDA could not unpin {size(len(mapping))} of host memory ({reason})", stacklevel=2)


def _available() -> int | None:
    return _kilobytes(_read(PROC / "meminfo"), "MemAvailable:")


def _kilobytes(meminfo: str | None, name: str) -> int | None:
    for line in (meminfo or "").splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_left() -> int | None:
    """The least that a control group (version 2) of this process leaves it, or one above."""
    return min((room for folder in _cgroup_folders() if (room := _room_in(folder)) is not None), default=None)


def _cgroup_folders() -> Iterator[Path]:
    for line in (_read(PROC / "self" / "cgroup") or "").splitlines():
        if line.startswith("0::/"):
            own = CONTROL_GROUPS / line[len("0::/") :]
            yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(CONTROL_GROUPS))


def _room_in(folder: Path) -> int | None:
    """The limit less what is used; cached files are not counted as used, since they make room when it is needed."""
    limit, used = _read(folder / "memory.max"), _read(folder / "memory.current")
    if limit is None or used is None or not limit.strip().isdigit():  # "max": no limit
        return None
    counts = dict(line.split() for line in (_read(folder / "memory.stat") or "").splitlines())
    cached = int(counts.get("inactive_file", 0)) + int(counts.get("active_file", 0))
    return max(0, int(limit) - max(0, int(used) - cached))


def _lock_limit() -> int | None:
    if sys.platform == "win32":
        return None
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _read(path: Path) -> str | None:
    """A file of the system's; None where there is none."""
    try:
        return path.read_text()
    except OSError:
        return None
