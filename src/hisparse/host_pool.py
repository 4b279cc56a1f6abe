"""The host pool: authoritative records of every live request, in pages of 64 with an owner each.

Fed by staging and write-through; read by resolve (fetches) and by prefill (tiles). A page is free or is held
by one or more requests: its reference count says by how many, which is what makes shared prefixes possible.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hisparse.errors import CapacityError, IntegrityError
from hisparse.host_memory import Progress, allocate
from hisparse.layout import PAGE_RECORDS, CacheLayout


class Pages:
    """Which pages are free and how often each of the others is held."""

    def __init__(self, num_pages: int) -> None:
        self.references = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # the lowest page is handed out first

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free pages, each held once. Raises `CapacityError` and takes none if too few are free."""
        if count > len(self._free):
            raise CapacityError(f"{count} pages asked for, {len(self._free)} of {len(self.references)} are free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self.references[page] = 1
        return pages

    def hold(self, pages: Sequence[int]) -> None:
        """Hold pages that are in use once more."""
        for page in pages:
            self.references[page] += 1

    def held_once(self, pages: Sequence[int]) -> list[int]:
        """Those of `pages` that would become free if they were let go."""
        return [page for page in pages if self.references[page] == 1]

    def let_go(self, pages: Sequence[int]) -> None:
        """Hold `pages` once less; the ones that nobody holds any more are free."""
        for page in pages:
            self.references[page] -= 1
            if self.references[page] == 0:
                self._free.append(page)

    def check(self, holders: Sequence[Sequence[int]]) -> None:
        """Prove that the counts are those of `holders` (each a list of pages) and the rest is free, once."""
        counted = [0] * len(self.references)
        for pages in holders:
            for page in pages:
                counted[page] += 1
        if counted != self.references:
            raise IntegrityError("a page's reference count is not the number of requests that hold it")
        if sorted(self._free) != [page for page, count in enumerate(counted) if count == 0]:
            raise IntegrityError("the free pages are not the pages that nobody holds")


class HostPool:
    """Records of all layers in host memory, pinned when the device is a GPU."""

    def __init__(self, layout: CacheLayout, *, pinned: bool, progress: Progress | None = None) -> None:
        self.pages = Pages(layout.num_pages)
        shape = (layout.num_layers, layout.num_rows, layout.record_bytes)
        self.records = allocate(shape, pinned=pinned, progress=progress)  # [layers, rows, record_bytes]

    def check_free(self, layout: CacheLayout) -> None:
        """Raise `ValueError` unless a new cache of this layout can have it."""
        shape = [layout.num_layers, layout.num_rows, layout.record_bytes]
        if list(self.records.shape) != shape:
            raise ValueError(f"host_pool must be {shape} as the layout says, got {list(self.records.shape)}")
        used = len(self.pages.references) - self.pages.num_free
        if used:
            raise ValueError(f"host_pool still has {used} pages of another cache's requests: retire them first")


def rows_of(pages: Tensor, positions: Tensor) -> Tensor:
    """Rows of `positions` in a request whose pages are `pages`.

    Args:
        pages: [..., p] integer page numbers of each request, -1 where it has none.
        positions: [..., n] integer, the leading dimensions those of `pages`; -1 pads.

    Returns:
        [..., n] int64 rows; -1 where the position is a pad or lies outside the request's pages.
    """
    column = positions.div(PAGE_RECORDS, rounding_mode="floor").long()
    inside = (column >= 0) & (column < pages.shape[-1])
    page = pages.long().gather(-1, column.clamp(0, pages.shape[-1] - 1))
    row = page * PAGE_RECORDS + positions.remainder(PAGE_RECORDS)
    return torch.where(inside & (page >= 0), row, -1)
