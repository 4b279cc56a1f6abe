"""A tiny checkpoint of every family that a checkpoint can be of."""

from pathlib import Path

from hisparse.checkpoint.tiny import write_tiny
from hisparse.checkpoint.tiny_mla import FAMILIES, write_tiny_mla
from hisparse.commands.make_tiny import LLAMA_LIKE
from hisparse.config import HiSparseConfig
from hisparse.plan.question import Question, ask

FP8_KEYS = HiSparseConfig(index_cache_dtype="fp8")
EVERY_FAMILY = (*LLAMA_LIKE, *FAMILIES)
MACHINE: dict[str, object] = {"device_memory": "64MB", "host_memory": "64MB", "dtype": "float32"}


def write_family(folder: Path, name: str, *, fp8: bool = False) -> Path:
    """A tiny checkpoint of this family; `fp8` weights where it has them."""
    return write_tiny(folder, LLAMA_LIKE[name]) if name in LLAMA_LIKE else write_tiny_mla(folder, name, fp8=fp8)


def ask_tiny(folder: Path, config: HiSparseConfig | None = None, **changes: str | int | float) -> Question:
    """What fits 64 MB of device and of host memory, or as changed; requests of 640 tokens."""
    arguments = MACHINE | {"context": "640"} | changes
    return ask(str(folder), config or HiSparseConfig(), **arguments)  # type: ignore[arg-type]


def ask_named(name: str = "glm-5.1", config: HiSparseConfig | None = None, /, **changes: str | int | float) -> Question:
    """A published model on 8 x H200 with 2 TB, as in the paper; or as changed."""
    arguments: dict[str, object] = {"device_memory": "141GB", "host_memory": "2TB", "gpus": 8, **changes}
    return ask(name, config or HiSparseConfig(), **arguments)  # type: ignore[arg-type]
