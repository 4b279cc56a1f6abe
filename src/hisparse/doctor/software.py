"""Versions, the compiler of the GPU kernels, and the folder where its results are kept."""

import ctypes
import importlib
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from hisparse.cache_folder import cache_folder
from hisparse.doctor.finding import Finding, Status, first_line

INSTALL_TORCH = "pip install torch (which build: https://pytorch.org/get-started/locally/)"
INSTALL_NVRTC = "pip install cuda-bindings nvidia-cuda-nvrtc"
NEW_DRIVER = "install a driver at least as new as NVRTC's CUDA, or an older cuda-bindings and nvidia-cuda-nvrtc"
RECORD_BYTES = 1152  # of the kernel that is compiled for a try; a DeepSeek record
WITHOUT_GPU = (9, 0)  # the compute capability compiled for where there is no GPU


def hisparse() -> Iterator[Finding]:
    """This package."""
    try:
        found = version("hisparse")
    except PackageNotFoundError:
        found = "not installed, run from source"
    yield Finding("hisparse", Status.OK, f"{found} in {Path(__file__).parents[1]}", values={"version": found})


def python() -> Iterator[Finding]:
    """The interpreter."""
    found = platform.python_version()
    yield Finding("Python", Status.OK, f"{found} on {platform.platform()}", values={"version": found})


def torch() -> Iterator[Finding]:
    """torch and the CUDA that it was built for."""
    try:
        import torch as module
    except Exception as error:  # ImportError, or whatever the loader of a shared library raises
        yield Finding("torch", Status.MISSING, f"cannot be imported ({first_line(error)})", INSTALL_TORCH)
        return
    cuda = module.version.cuda
    built = f"built for CUDA {cuda}" if cuda else "a CPU build: it sees no GPU"
    yield Finding(
        "torch", Status.OK, f"{module.__version__}, {built}", values={"version": module.__version__, "cuda": cuda}
    )


def nvrtc() -> Iterator[Finding]:
    """cuda-bindings and NVRTC, which compile and launch the GPU kernels."""
    try:
        importlib.import_module("cuda.bindings.driver")
        _, major, minor = importlib.import_module("cuda.bindings.nvrtc").nvrtcVersion()  # loads the library
    except Exception as error:  # ImportError, or whatever the loader of the shared library raises
        says = f"cannot be loaded, so there are no GPU kernels ({first_line(error)})"
        yield Finding("NVRTC", Status.MISSING, says, INSTALL_NVRTC)
        return
    found, bindings = f"{major}.{minor}", version("cuda-bindings")
    values = {"version": found, "cuda_bindings": bindings}
    yield Finding("NVRTC", Status.OK, f"{found}, through cuda-bindings {bindings}", values=values)


def kernel() -> Iterator[Finding]:
    """Whether a kernel compiles: for this GPU, or for an H200 where there is none."""
    from hisparse.kernels.build import BuildError, architecture_name

    try:
        architecture = architecture_name(*_capability())
    except BuildError as error:
        yield Finding("kernel", Status.NOTE, str(error))
        return
    try:
        seconds = compile_seconds(architecture)
    except BuildError as error:
        fix = INSTALL_NVRTC if "pip install" in str(error) else None
        yield Finding("kernel", Status.MISSING, f"resolve does not compile ({first_line(error)})", fix)
        return
    try:
        loads = _load_kernel()
    except BuildError as error:
        yield Finding("kernel", Status.MISSING, f"resolve compiles but does not load ({first_line(error)})", NEW_DRIVER)
        return
    says = f"resolve compiles for {architecture} in {seconds:.2f} s" + (" and loads" if loads else "")
    yield Finding("kernel", Status.OK, says, values={"architecture": architecture, "seconds": seconds})


def _load_kernel() -> bool:
    """Whether there is a GPU to load resolve on. Raises `BuildError` if it does not load, as with an old driver."""
    from hisparse.doctor.machine import look_for_cuda

    if not look_for_cuda().available:
        return False
    import torch as module

    from hisparse.kernels.resolve import load_resolve

    load_resolve(RECORD_BYTES, module.device("cuda", 0))
    return True


def _capability() -> tuple[int, int]:
    from hisparse.doctor.machine import look_for_cuda

    if not look_for_cuda().available:
        return WITHOUT_GPU
    import torch as module

    return module.cuda.get_device_capability(0)


def compile_seconds(architecture: str) -> float:
    """Seconds that resolve.cu takes to compile. Raises `BuildError` if it does not."""
    from hisparse.kernels.build import build
    from hisparse.kernels.params import ResolveParams
    from hisparse.kernels.resolve import IN_FLIGHT

    size = ctypes.sizeof(ResolveParams)
    defines = {"PARAMS_BYTES": size, "RECORD_BYTES": RECORD_BYTES, "IO": 1, "IN_FLIGHT": IN_FLIGHT}
    with _empty_cache():
        start = time.perf_counter()
        build("resolve.cu", defines, architecture)
        return time.perf_counter() - start


@contextmanager
def _empty_cache() -> Iterator[None]:
    """A cache folder with nothing in it, so that a build compiles and the user's folder need not be writable."""
    before = os.environ.get("HISPARSE_CACHE")
    with tempfile.TemporaryDirectory(prefix="hisparse-doctor-") as folder:
        os.environ["HISPARSE_CACHE"] = folder
        try:
            yield
        finally:
            del os.environ["HISPARSE_CACHE"]
            if before is not None:
                os.environ["HISPARSE_CACHE"] = before


def kernel_cache() -> Iterator[Finding]:
    """Where compiled kernels are kept."""
    folder = cache_folder() / "kernels"
    try:
        files = [path for path in folder.glob("*") if path.is_file()]
        held = sum(path.stat().st_size for path in files)
        with tempfile.TemporaryFile(dir=_nearest(folder)):  # permissions alone would say too little
            pass
    except OSError as error:
        says = f"{folder} cannot be used, so every process compiles the kernels anew ({first_line(error)})"
        fix = "export HISPARSE_CACHE=<a folder that you can write to>"
        yield Finding("kernel cache", Status.MISSING, says, fix, {"folder": str(folder), "writable": False})
        return
    says = f"{folder}, {len(files)} files, {held / 1e6:.1f} MB, writable"
    values = {"folder": str(folder), "writable": True, "files": len(files), "kept_bytes": held}
    yield Finding("kernel cache", Status.OK, says, values=values)


def _nearest(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(path for path in (folder, *folder.parents) if path.exists())
