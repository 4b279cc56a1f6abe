"""A hierarchical KV cache for top-k sparse attention: full history on the host, a small pool on the GPU.

The library's public names; the rest of the package is importable from its modules. They are imported at
first use, so that the command line answers `--help` without waiting for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hisparse.admission import CacheRequest
    from hisparse.cache import HierarchicalCache
    from hisparse.errors import (
        CapacityError,
        CheckpointError,
        HiSparseError,
        IntegrityError,
        ModelOutputError,
        NeverFitsError,
    )
    from hisparse.layout import CacheLayout
    from hisparse.selection_state import SelectionState
    from hisparse.statistics import Statistics
    from hisparse.step import Step

__all__ = [
    "CacheLayout",
    "CacheRequest",
    "CapacityError",
    "CheckpointError",
    "HiSparseError",
    "HierarchicalCache",
    "IntegrityError",
    "ModelOutputError",
    "NeverFitsError",
    "SelectionState",
    "Statistics",
    "Step",
]

_MODULES = {
    "CacheLayout": "layout",
    "CacheRequest": "admission",
    "HierarchicalCache": "cache",
    "SelectionState": "selection_state",
    "Statistics": "statistics",
    "Step": "step",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'hisparse' has no attribute {name!r}")
    return getattr(import_module(f"hisparse.{_MODULES.get(name, 'errors')}"), name)
