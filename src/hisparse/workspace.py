"""Tiles through which prefill reads earlier records: a fixed amount of device memory for any context length.

Fed by the host pool; read by attention/tiled.py. Two tiles take turns, so that on a GPU the next one can be
filled while this one is read.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from hisparse.layout import NUM_TILES, TILE_RECORDS, CacheLayout


class Workspace:
    """Two tiles of 1,024 records on the device."""

    def __init__(self, layout: CacheLayout, device: torch.device) -> None:
        shape = (NUM_TILES, TILE_RECORDS, layout.record_bytes)
        self._tiles = torch.empty(shape, dtype=torch.uint8, device=device)

    def read(self, fetch: Callable[[Tensor, Tensor], None], rows: Tensor) -> Iterator[Tensor]:
        """Yield the records of `rows` in order, at most 1,024 at a time.

        Args:
            fetch: given int64 [m] rows and uint8 [m, record_bytes] to fill, copies one layer's records there.
            rows: [n] int64.

        Yields:
            [m, record_bytes] uint8 on the device. A tile is overwritten two tiles later.
        """
        for number, start in enumerate(range(0, rows.numel(), TILE_RECORDS)):
            chunk = rows[start : start + TILE_RECORDS]
            tile = self._tiles[number % NUM_TILES, : chunk.numel()]
            fetch(chunk, tile)
            yield tile
