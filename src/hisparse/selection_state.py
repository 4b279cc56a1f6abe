"""Selection state in pages: what a selector keeps on the device to choose positions by.

It grows with the context, so it is paged, budgeted when a request is admitted, and reported beside the KV
bytes, never inside them. A page covers the same 64 positions as a page of the host pool. What stands in a
page is the selector's business: its shape is an argument.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hisparse.host_pool import Pages
from hisparse.layout import PAGE_RECORDS


class SelectionState:
    """A pool of selection-state pages for all layers, and each request's table of them.

    Args:
        num_layers: model layers.
        num_pages: pages shared by all requests.
        page_shape: shape of a page's state in one layer, as the selector asks for it.
        dtype: of the state.
        max_requests, max_pages: shape of the page table.
        device: where the state lives.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_shape: Sequence[int],
        dtype: torch.dtype,
        max_requests: int,
        max_pages: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.pages = Pages(num_pages)
        self.scratch_page = num_pages  # for the padded lines of a step: written, and never read
        self.data = torch.empty(num_layers, num_pages + 1, *page_shape, dtype=dtype, device=device)
        self.page_table = torch.full((max_requests, max_pages), -1, dtype=torch.int32, device=device)

    @property
    def bytes_per_token(self) -> float:
        """Device bytes that one position takes in all layers."""
        return self.data[:, :1].numel() * self.data.element_size() / PAGE_RECORDS

    @property
    def used_bytes(self) -> int:
        """Device bytes of the pages in use."""
        used = len(self.pages.references) - self.pages.num_free
        return used * int(self.bytes_per_token * PAGE_RECORDS)

    def save(self, pages: Sequence[int]) -> Tensor:
        """The pages' contents, copied to host memory: [layers, pages, ...]."""
        return self.data[:, list(pages)].to("cpu", copy=True)

    def restore(self, pages: Sequence[int], saved: Tensor) -> None:
        """Write saved contents into (other) pages."""
        self.data[:, list(pages)] = saved.to(self.data.device)
