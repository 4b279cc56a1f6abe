"""Whether triton's kernels can be used: asked before they are imported, since only GPU builds of torch bring triton."""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

LEAST_DIM, MOST_DIM = 16, 512


@cache
def _is_installed() -> bool:
    return find_spec("triton") is not None


def can_use_triton(query: Tensor, records_dtype: torch.dtype, *dims: int) -> bool:
    """For queries on this device, records of a dtype, and vectors of `dims` elements."""
    fits = all(LEAST_DIM <= dim <= MOST_DIM and dim & (dim - 1) == 0 for dim in dims)
    is_half = query.dtype in (torch.bfloat16, torch.float16) and records_dtype == query.dtype
    return query.is_cuda and is_half and fits and query.numel() > 0 and _is_installed()
