"""Tiles through which prefill reads earlier records: a fixed amount of device memory for any context length.

Fed by the host pool; read by attention/tiled.py. Two tiles take turns: on a GPU the next one is filled, on a stream of
its own, while this one is read.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from hisparse.kernels.side_stream import SideStream
from hisparse.layout import NUM_TILES, TILE_RECORDS, CacheLayout


class Workspace:
    """Two tiles of 1,024 records on the device."""

    def __init__(self, layout: CacheLayout, device: torch.device) -> None:
        shape = (NUM_TILES, TILE_RECORDS, layout.record_bytes)
        self._tiles = torch.empty(shape, dtype=torch.uint8, device=device)
        self._side = SideStream(device) if device.type == "cuda" else None

    def read(self, fetch: Callable[[Tensor, Tensor], None], rows: Tensor) -> Iterator[Tensor]:
        """Yield the records of `rows` in order, at most 1,024 at a time.

        Args:
            fetch: given int64 [m] rows and uint8 [m, record_bytes] to fill, copies one layer's records there.
            rows: [n] int64.

        Yields:
            [m, record_bytes] uint8 on the device. A tile is overwritten two tiles later.
        """
        chunks = rows.split(TILE_RECORDS) if rows.numel() else ()
        tiles = [self._tiles[number % NUM_TILES, : len(chunk)] for number, chunk in enumerate(chunks)]
        if self._side is None:
            for chunk, tile in zip(chunks, tiles, strict=True):
                fetch(chunk, tile)
                yield tile
        else:
            yield from self._read_ahead(self._side, fetch, list(zip(chunks, tiles, strict=True)))

    def _read_ahead(
        self, side: SideStream, fetch: Callable[[Tensor, Tensor], None], work: Sequence[tuple[Tensor, Tensor]]
    ) -> Iterator[Tensor]:
        """Each tile is filled while the one before is read; by then its own last reader was launched."""

        def start(number: int) -> None:
            with side.fork(number, keep=work[number]):
                fetch(*work[number])

        if work:
            start(0)
        try:
            for number, (_, tile) in enumerate(work):
                if number + 1 < len(work):
                    start(number + 1)
                side.join(number)
                yield tile
        finally:
            side.join_all()
