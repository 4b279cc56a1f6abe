"""Register operations with `torch.library`, so that compiled graphs may contain them.

Every operation writes its results into arguments: its schema says which, and its fake implementation does nothing.
"""

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("hisparse", "FRAGMENT")


def register(schema: str, implementation: Callable[..., None]) -> None:
    """Make `torch.ops.hisparse.<name>` of a schema without results, for CUDA tensors."""
    _LIBRARY.define(schema + " -> ()")
    name = schema.partition("(")[0]
    _LIBRARY.impl(name, implementation, "CUDA")
    torch.library.register_fake(f"hisparse::{name}", _nothing, lib=_LIBRARY)


def _nothing(*_: Any) -> None:
    """A fake implementation."""
