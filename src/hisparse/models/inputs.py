"""Checks what every decoder's `forward` is given."""

import torch
from torch import Tensor


def check_ids(argument: str, ids: Tensor, tokens: Tensor) -> None:
    """Raise `ValueError` unless `ids` are int64 [t], as many as there are tokens."""
    if ids.dtype != torch.int64 or ids.dim() != 1 or ids.shape != tokens.shape:
        raise ValueError(
            f"{argument}: expected int64 of shape [t], as many positions as tokens, "
            f"got {ids.dtype} of shape {tuple(ids.shape)}"
        )
