"""How the keys of an indexer stand in the pages of its state: as the model makes them, or in FP8."""

from typing import Protocol

import torch
from torch import Tensor

from hisparse.attention.latent_records import FP8_GROUP, SCALE_BYTES, from_fp8, to_fp8
from hisparse.layout import PAGE_RECORDS


class KeyFormat(Protocol):
    """How index keys stand in a page of state."""

    page_shape: tuple[int, ...]
    dtype: torch.dtype

    def write(self, state: Tensor, pages: Tensor, offsets: Tensor, keys: Tensor) -> None:
        """Keys [n, head_dim] to their places in pages [n]."""

    def read(self, state: Tensor, pages: Tensor) -> Tensor:
        """The keys of whole pages [p], float32 [p * 64, head_dim]."""


class PlainKeys:
    """Keys as the model makes them: pages of [64, head_dim]."""

    def __init__(self, head_dim: int, dtype: torch.dtype) -> None:
        self.page_shape: tuple[int, ...] = (PAGE_RECORDS, head_dim)
        self.dtype = dtype

    def write(self, state: Tensor, pages: Tensor, offsets: Tensor, keys: Tensor) -> None:
        """See `KeyFormat`."""
        state[pages, offsets] = keys.to(self.dtype)

    def read(self, state: Tensor, pages: Tensor) -> Tensor:
        """See `KeyFormat`."""
        return state.index_select(0, pages).float().flatten(0, 1)


class Fp8Keys:
    """A page's 64 keys in float8 e4m3, then their 64 float32 scales, as bytes: DeepGEMM's paged layout.

    The scales stand apart so that keys can be loaded 16 bytes at a time.
    """

    dtype = torch.uint8

    def __init__(self, head_dim: int) -> None:
        if head_dim > FP8_GROUP:
            raise ValueError(f"FP8 index keys have one scale for at most {FP8_GROUP} elements, got head_dim {head_dim}")
        self._head_dim = head_dim
        self._key_bytes = PAGE_RECORDS * head_dim
        self.page_shape: tuple[int, ...] = (self._key_bytes + PAGE_RECORDS * SCALE_BYTES,)

    def write(self, state: Tensor, pages: Tensor, offsets: Tensor, keys: Tensor) -> None:
        """See `KeyFormat`."""
        values, scales = to_fp8(keys)
        key_view, scale_view = self._views(state)
        key_view[pages, offsets] = values.view(torch.uint8)
        scale_view[pages, offsets] = scales[:, 0]

    def read(self, state: Tensor, pages: Tensor) -> Tensor:
        """See `KeyFormat`."""
        values, scales = self._views(state.index_select(0, pages))
        return from_fp8(values.view(torch.float8_e4m3fn), scales[..., None]).flatten(0, 1)

    def _views(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Of pages: keys uint8 [p, 64, head_dim], scales float32 [p, 64]."""
        keys = state[:, : self._key_bytes].unflatten(1, (PAGE_RECORDS, self._head_dim))
        return keys, state[:, self._key_bytes :].view(torch.float32)
