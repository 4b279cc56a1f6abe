"""Load compiled kernels and launch them on torch's current stream, also while a CUDA graph is captured.

Fed by build.py; used by the launchers: the files beside this that are named after sources in cuda/, and copies.py and
tables.py. A kernel is loaded once a device and kept.
"""

import ctypes
import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from hisparse.kernels.build import BuildError, architecture_name, build

SHARED_BYTES_UNASKED = 48 * 1024  # a block may have this much


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel on one device."""

    function: Any  # CUfunction
    device: int
    multiprocessors: int
    shared_limit: int  # bytes of dynamic shared memory that a block may have
    can_overlap: bool  # with the launch before it: from sm_90 on


class LaunchError(BuildError):
    """The driver refused to load or launch a kernel."""


def load(source: str, name: str, params: type[ctypes.Structure], device: torch.device, **defines: int) -> Kernel:
    """The kernel `name` of a file in cuda/, compiled for `device` with -DHISPARSE_<define>=<value>."""
    index = torch.cuda.current_device() if device.index is None else device.index
    items = (("PARAMS_BYTES", ctypes.sizeof(params)), *sorted(defines.items()))
    return _load(source, name, index, items)


@cache
def _load(source: str, name: str, device: int, defines: tuple[tuple[str, int], ...]) -> Kernel:
    driver = _driver()
    properties = torch.cuda.get_device_properties(device)
    built = build(source, dict(defines), architecture_name(properties.major, properties.minor))
    with torch.cuda.device(device):
        library = _library(built.cubin)
        kernel = _result(driver.cuLibraryGetKernel(library, name.encode()), f"load {name}")
        function = _result(driver.cuKernelGetFunction(kernel), f"load {name}")
        shared_limit = _shared_limit(function, device)
    return Kernel(function, device, properties.multi_processor_count, shared_limit, can_overlap=properties.major >= 9)


@cache
def _library(cubin: bytes) -> Any:
    return _result(_driver().cuLibraryLoadData(cubin, [], [], 0, [], [], 0), "load a cubin")


def _shared_limit(function: Any, device: int) -> int:
    driver = _driver()
    most = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    own = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
    whole = _result(driver.cuDeviceGetAttribute(most, device), "ask for the shared memory")
    return int(whole) - int(_result(driver.cuFuncGetAttribute(own, function), "ask for a kernel's shared memory"))


@cache
def max_resident_blocks(kernel: Kernel, threads: int, shared_bytes: int) -> int:
    """Blocks of a kernel, each with at most `kernel.shared_limit` bytes, that the whole GPU can hold at once."""
    if shared_bytes > SHARED_BYTES_UNASKED:
        _allow_all_shared_bytes(kernel)
    count = _driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(kernel.function, threads, shared_bytes)
    return int(_result(count, "ask for the occupancy")) * kernel.multiprocessors


@cache
def _allow_all_shared_bytes(kernel: Kernel) -> None:
    """Once and to the limit: the driver keeps the last value, not the largest."""
    driver = _driver()
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _result(driver.cuFuncSetAttribute(kernel.function, attribute, kernel.shared_limit), "enlarge shared memory")


def launch(
    kernel: Kernel,
    params: ctypes.Structure,
    blocks: tuple[int, int],
    threads: int,
    *,
    shared_bytes: int = 0,
    cooperative: bool = False,
    overlaps: bool = False,
) -> None:
    """Launch on torch's current stream of the kernel's device.

    Args:
        kernel: from `load`.
        params: the kernel's only argument; it is copied.
        blocks: the grid, x and y.
        threads: of a block.
        shared_bytes: dynamic shared memory of a block.
        cooperative: all blocks start together or not at all, whatever else runs on the GPU.
        overlaps: blocks may start while the launch before ends; the kernel waits for it by itself (sm_90 on).
    """
    driver = _driver()
    if shared_bytes > SHARED_BYTES_UNASKED:
        _allow_all_shared_bytes(kernel)
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = *blocks, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared_bytes
    config.hStream = torch.cuda.current_stream(kernel.device).cuda_stream
    attributes = _attributes(cooperative, overlaps and kernel.can_overlap)
    if attributes:
        config.attrs = attributes
        config.numAttrs = len(attributes)
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
    with torch.cuda.device(kernel.device):
        _result(driver.cuLaunchKernelEx(config, kernel.function, ctypes.addressof(arguments), 0), "launch a kernel")


@cache
def _attributes(cooperative: bool, overlaps: bool) -> list[Any]:
    driver = _driver()
    names, attributes = driver.CUlaunchAttributeID, []
    if cooperative:
        attributes.append(driver.CUlaunchAttribute())
        attributes[-1].id = names.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        attributes[-1].value.cooperative = 1
    if overlaps:
        attributes.append(driver.CUlaunchAttribute())
        attributes[-1].id = names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attributes[-1].value.programmaticStreamSerializationAllowed = 1
    return attributes


@cache
def _driver() -> Any:
    if not torch.cuda.is_available():
        raise BuildError("no usable NVIDIA GPU: torch.cuda.is_available() is False. Use the CPU backend: device='cpu'")
    try:
        driver = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise BuildError(f"cuda-bindings is missing ({error}). Install it with: pip install cuda-bindings") from error
    return driver


def _result(answer: Iterable[Any], what: str) -> Any:
    status, *values = answer
    if int(status):
        raise LaunchError(f"the CUDA driver refused to {what}: {status.name}")
    return values[0] if values else None
