"""Tiles through which prefill reads earlier records: a fixed amount of device memory for any context length.

Fed by the host pool; read by attention/tiled.py. Two tiles take turns: on a GPU the next one is filled, on a stream of
its own, while this one is read, and the next layer's first one while this layer's last is read and all that follows it.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hisparse.kernels.side_stream import SideStream
from hisparse.layout import NUM_TILES, TILE_RECORDS, CacheLayout

Fetch = Callable[[Tensor, Tensor], None]  # copies the records of int64 [m] rows to uint8 [m, record_bytes]
Filling = tuple[Fetch, Tensor]  # what fills a tile, and with which rows


class Source(NamedTuple):
    """Records that are to be read."""

    name: Hashable  # the same name, the same records
    fetch: Fetch
    rows: Tensor  # int64 [n]


class Workspace:
    """Two tiles of 1,024 records on the device."""

    def __init__(self, layout: CacheLayout, device: torch.device) -> None:
        shape = (NUM_TILES, TILE_RECORDS, layout.record_bytes)
        self._tiles = torch.empty(shape, dtype=torch.uint8, device=device)
        self._side = SideStream(device) if device.type == "cuda" else None
        self._next = 0  # the tile that is filled next
        self._ahead: Hashable | None = None  # whose first tile was filled, or is being filled, last

    def read(self, source: Source, following: Source | None = None) -> Iterator[Tensor]:
        """Yield a source's records in order, at most 1,024 at a time.

        Args:
            source: what to read.
            following: what will probably be read next.

        Yields:
            [m, record_bytes] uint8 on the device, valid until the next tile is asked for.
        """
        tiles = [(source.fetch, rows) for rows in source.rows.split(TILE_RECORDS) if len(rows)]
        upcoming = deque(tiles)
        if tiles and following is not None:
            upcoming.append((following.fetch, following.rows[:TILE_RECORDS]))
        ahead, self._ahead = self._ahead, None
        if tiles and ahead == source.name:
            upcoming.popleft()
        else:
            self._fill_next(upcoming)
        for _, rows in tiles:
            place = (self._next - 1) % NUM_TILES
            self._fill_next(upcoming)
            if self._side is not None:
                self._side.join(place)
            yield self._tiles[place, : len(rows)]
        if tiles and following is not None:
            self._ahead = following.name

    def _fill_next(self, upcoming: deque[Filling]) -> None:
        """Fill the next tile, if any; on a GPU its last reader was launched by now, and is waited for."""
        if not upcoming:
            return
        fetch, rows = upcoming.popleft()
        place, self._next = self._next, (self._next + 1) % NUM_TILES
        tile = self._tiles[place, : len(rows)]
        if self._side is None:
            fetch(rows, tile)
        else:
            with self._side.fork(place, keep=(rows,)):
                fetch(rows, tile)
