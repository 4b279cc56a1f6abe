"""Compile the CUDA sources with NVRTC, without a GPU, a toolkit or a host compiler, and keep the results on disk.

Fed by cuda/*.cu and the definitions that an operation asks for; feeds launch.py, and the compile tests, which
read the resources that ptxas reports. A cubin is kept under a name that hashes everything it depends on, and is
written under a temporary name and renamed, so that several processes can start at once.
"""

import hashlib
import importlib
import os
import re
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from hisparse.cache_folder import cache_folder
from hisparse.errors import HiSparseError

SOURCES = Path(__file__).parent / "cuda"
OLDEST_ARCHITECTURE = 80  # compute capability times ten

Defines = Mapping[str, int]  # name, without its HISPARSE_ prefix -> value


class BuildError(HiSparseError):
    """The GPU kernels cannot be compiled or loaded here. The message says what is missing."""


class Resources(NamedTuple):
    """What ptxas says that a kernel takes."""

    registers: int  # a thread
    shared_bytes: int  # a block, without what the launch adds
    spill_bytes: int  # stores and loads of a thread; 0 in every kernel of ours


@dataclass(frozen=True)
class Build:
    """A compiled source: machine code for one architecture, and ptxas' report."""

    cubin: bytes
    log: str

    @property
    def resources(self) -> dict[str, Resources]:
        """Resources by kernel."""
        pattern = re.compile(
            r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
            r".*?Used (\d+) registers([^\n]*)",
            re.DOTALL,
        )
        found = {}
        for name, stores, loads, registers, rest in pattern.findall(self.log):
            shared = re.search(r"(\d+) bytes smem", rest)
            found[name] = Resources(int(registers), int(shared[1]) if shared else 0, int(stores) + int(loads))
        return found


def architecture_name(major: int, minor: int) -> str:
    """NVRTC's name of a GPU's architecture, such as sm_90a. Raises `BuildError` for one older than sm_80."""
    if major * 10 + minor < OLDEST_ARCHITECTURE:
        raise BuildError(
            f"this GPU has compute capability {major}.{minor}; the kernels need 8.0 (A100) or newer. "
            f"Use the CPU backend: device='cpu'"
        )
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def build(source: str, defines: Defines, architecture: str) -> Build:
    """The compiled `source` (a file of cuda/), from disk if it was compiled before.

    Raises:
        BuildError: NVRTC is missing or too old for the architecture, or the source does not compile.
    """
    options = [
        f"--gpu-architecture={architecture}",
        "--std=c++17",
        "--ptxas-options=-v",
        *(f"-DHISPARSE_{name}={value}" for name, value in sorted(defines.items())),
    ]
    path = _folder() / f"{Path(source).stem}-{architecture}-{_digest(source, options)}.cubin"
    log = path.with_suffix(".log")
    if path.is_file() and log.is_file():
        return Build(path.read_bytes(), log.read_text())
    built = _compile(source, options)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(log, built.log.encode())  # first: a cubin is complete once it has its name
        _write(path, built.cubin)
    except OSError as error:  # what is compiled works all the same
        warnings.warn(
            f"compiled kernels cannot be kept in {path.parent} ({error.strerror or error}), so every process compiles "
            f"them anew: set HISPARSE_CACHE to a folder that can be written",
            stacklevel=2,
        )
    return built


def _folder() -> Path:
    return cache_folder() / "kernels"


@cache
def _headers() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(SOURCES.glob("*.cuh"))}


def _digest(source: str, options: list[str]) -> str:
    """A name for everything that the machine code depends on."""
    texts = [(SOURCES / source).read_bytes(), *_headers().values()]
    texts += [option.encode() for option in options] + [repr(_nvrtc_version()).encode()]
    digest = hashlib.sha256()
    for text in texts:
        digest.update(hashlib.sha256(text).digest())
    return digest.hexdigest()[:24]


def _write(path: Path, content: bytes) -> None:
    """Write under a temporary name of our own, then rename: readers see all of it or nothing."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@cache
def _nvrtc() -> Any:
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
        nvrtc.nvrtcVersion()  # loads the library
    except Exception as error:  # ImportError, or whatever the loader of the shared library raises
        raise BuildError(
            f"NVRTC, NVIDIA's run-time compiler, could not be loaded ({error}). "
            f"Install it with: pip install cuda-bindings nvidia-cuda-nvrtc"
        ) from error
    return nvrtc


@cache
def _nvrtc_version() -> tuple[int, int]:
    _, major, minor = _nvrtc().nvrtcVersion()
    return major, minor


def _compile(source: str, options: list[str]) -> Build:
    nvrtc = _nvrtc()
    headers = _headers()
    text = (SOURCES / source).read_bytes()
    names = [name.encode() for name in headers]
    result, program = nvrtc.nvrtcCreateProgram(text, source.encode(), len(names), list(headers.values()), names)
    _check(result, source, "")
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).decode(errors="replace")
        _check(result, source, log)
        return Build(_read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program), log.rstrip("\0"))
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _read(get_size: Any, get: Any, program: Any) -> bytes:
    _, size = get_size(program)
    buffer = bytes(int(size))  # NVRTC fills it in place
    get(program, buffer)
    return buffer


def _check(result: Any, source: str, log: str) -> None:
    if int(result):
        version = ".".join(map(str, _nvrtc_version()))
        raise BuildError(f"{source} did not compile with NVRTC {version}: {result.name}\n{log}".rstrip())
