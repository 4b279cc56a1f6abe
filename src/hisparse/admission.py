"""Who is in the cache and what each request holds: reservations, host pages, selection-state pages.

Fed by the cache's public calls; read by resolve through the page table. Everything a request will ever need is
taken when it is admitted, or nothing is, so that nothing runs dry half-way. Slots are not handled here: the
cache frees them (release) before it tells this book that a request leaves.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from hisparse.errors import CapacityError, NeverFitsError
from hisparse.host_pool import Pages, rows_of
from hisparse.layout import PAGE_RECORDS, CacheLayout, num_pages_for
from hisparse.selection_state import SelectionState


class State(Enum):
    """Where a request stands."""

    ACTIVE = "active"  # it has a reservation and can take part in steps
    RETRACTED = "retracted"  # its history is on the host; nothing of it is on the device
    RETIRED = "retired"  # it is gone


@dataclass(eq=False)
class CacheRequest:
    """A request's part of the cache. Made by `HierarchicalCache.admit`; engines read it and hand it back."""

    capacity: int  # positions it may ever have
    pages: list[int]  # of the host pool
    state_pages: list[int]  # of the selection state
    length: int = 0  # positions whose records are complete in every layer
    state: State = State.ACTIVE
    index: int = -1  # its line in the page tables while active
    staged: list[int] = field(default_factory=list)  # positions staged so far, by layer
    saved_state: Tensor | None = None  # selection state while retracted


class Admission:
    """The book of requests. The methods are those of `HierarchicalCache`, without the slots."""

    def __init__(
        self, layout: CacheLayout, host_pages: Pages, selection_state: SelectionState | None, device: torch.device
    ) -> None:
        if selection_state is not None:
            _check_shape(selection_state, layout)
        self.requests: list[CacheRequest] = []  # all that are not retired
        self._members: set[CacheRequest] = set()  # likewise
        self.free_index = list(range(layout.max_requests - 1, -1, -1))  # a reservation is a line of the page table
        shape = (layout.max_requests, layout.max_pages)
        self.page_table = torch.full(shape, -1, dtype=torch.int32, device=device)
        self._layout = layout
        self._host_pages = host_pages
        self._state = selection_state

    def admit(self, max_positions: int, prefix: tuple[CacheRequest, int] | None) -> CacheRequest:
        """Take a reservation and pages; with `prefix`, hold another request's first pages as well."""
        self._check_can_ever_fit(max_positions)
        donor, shared = prefix or (None, 0)
        if donor is not None:
            self.check_member(donor, State.ACTIVE)
            _check_prefix(donor, shared, max_positions)
        num_shared = shared // PAGE_RECORDS
        num_new = num_pages_for(max_positions) - num_shared
        self._check_fits_now(num_new, num_new)
        request = CacheRequest(max_positions, self._host_pages.allocate(num_new), [], length=shared)
        if self._state is not None:
            request.state_pages = self._state.pages.allocate(num_new)
        if donor is not None:
            self._share(request, donor, num_shared)
        request.staged = [shared] * self._layout.num_layers
        self._give_index(request)
        self.requests.append(request)
        self._members.add(request)
        return request

    def can_admit(self, max_positions: int) -> bool:
        """Whether `admit` would succeed now. Raises `NeverFitsError` if it never will."""
        self._check_can_ever_fit(max_positions)
        num_pages = num_pages_for(max_positions)
        try:
            self._check_fits_now(num_pages, num_pages)
        except CapacityError:
            return False
        return True

    def retract(self, request: CacheRequest) -> None:
        """Save the selection state and let it and the reservation go; keep the host pages."""
        if self._state is not None:
            request.saved_state = self._state.save(request.state_pages)
        self._leave_device(request)
        request.state = State.RETRACTED

    def resume(self, request: CacheRequest) -> None:
        """Take a reservation again and bring the selection state back."""
        self._check_fits_now(0, len(request.pages))
        if self._state is not None and request.saved_state is not None:
            request.state_pages = self._state.pages.allocate(len(request.pages))
            self._state.restore(request.state_pages, request.saved_state)
        request.saved_state = None
        request.state = State.ACTIVE
        self._give_index(request)

    def retire(self, request: CacheRequest) -> None:
        """Let everything go."""
        if request.state is State.ACTIVE:
            self._leave_device(request)
        self._host_pages.let_go(request.pages)
        request.pages, request.saved_state = [], None
        request.state = State.RETIRED
        self.requests.remove(request)
        self._members.remove(request)

    def rows(self, request: CacheRequest, start: int, end: int) -> Tensor:
        """Rows of an active request's positions `start` to `end` - 1, int64 [end - start]."""
        positions = torch.arange(start, end, device=self.page_table.device)
        return rows_of(self.page_table[request.index], positions)

    def own_rows(self, request: CacheRequest) -> Tensor:
        """Rows of the pages that no other request holds, int64."""
        own = torch.tensor(self._host_pages.held_once(request.pages), dtype=torch.int64, device=self.page_table.device)
        return (own[:, None] * PAGE_RECORDS + torch.arange(PAGE_RECORDS, device=own.device)).flatten()

    def check_member(self, request: CacheRequest, state: State | None = None) -> None:
        """Raise `ValueError` unless the request is in this cache, and in that state."""
        if request not in self._members:
            raise ValueError(f"this request is not in the cache (it is {request.state.value})")
        if state is not None and request.state is not state:
            raise ValueError(f"this needs a request that is {state.value}, got one that is {request.state.value}")

    def check_can_step(self, requests: Sequence[CacheRequest]) -> None:
        """Raise `ValueError` unless every request can take one more position."""
        if not requests:
            raise ValueError("a step needs at least one request")
        if len({id(request) for request in requests}) != len(requests):
            raise ValueError("a request can take part in a step only once")
        for request in requests:
            self.check_member(request, State.ACTIVE)
            if request.staged.count(request.length) != self._layout.num_layers:
                raise ValueError(f"a request's layers are staged unevenly, {request.staged}: finish its chunk first")
            if request.length >= request.capacity:
                raise ValueError(f"a request has used all {request.capacity} positions that it was admitted with")

    def _share(self, request: CacheRequest, donor: CacheRequest, num_shared: int) -> None:
        """Put the donor's first pages before the request's own."""
        self._host_pages.hold(donor.pages[:num_shared])
        request.pages = donor.pages[:num_shared] + request.pages
        if self._state is not None:
            self._state.pages.hold(donor.state_pages[:num_shared])
            request.state_pages = donor.state_pages[:num_shared] + request.state_pages

    def _give_index(self, request: CacheRequest) -> None:
        request.index = self.free_index.pop()
        _write_line(self.page_table, request.index, request.pages)
        if self._state is not None:
            _write_line(self._state.page_table, request.index, request.state_pages)

    def _leave_device(self, request: CacheRequest) -> None:
        """Free the selection state and the reservation."""
        if self._state is not None:
            self._state.pages.let_go(request.state_pages)
            self._state.page_table[request.index] = -1
            request.state_pages = []
        self.page_table[request.index] = -1
        self.free_index.append(request.index)
        request.index = -1

    def _check_can_ever_fit(self, max_positions: int) -> None:
        if max_positions < 1:
            raise ValueError(f"max_positions must be at least 1, got {max_positions}")
        layout = self._layout
        limit = min(layout.max_positions, layout.num_rows)
        if self._state is not None:
            limit = min(limit, len(self._state.pages.references) * PAGE_RECORDS)
        if max_positions > limit:
            raise NeverFitsError(
                f"a request of {max_positions} positions can never fit: one request can have {limit} "
                f"(host pool {layout.num_rows} rows, {layout.max_positions} positions a request). "
                f"Shorten it, or build the cache with more host pages"
            )

    def _check_fits_now(self, num_pages: int, num_state_pages: int) -> None:
        if not self.free_index:
            raise CapacityError(
                f"all {self._layout.max_requests} reservations of the device pool are taken; wait for one"
            )
        pools = [("host", self._host_pages.num_free, num_pages)]
        if self._state is not None:
            pools.append(("selection-state", self._state.pages.num_free, num_state_pages))
        for name, free, wanted in pools:
            if wanted > free:
                raise CapacityError(f"{wanted} {name} pages are needed and {free} are free; wait for some")


def _write_line(page_table: Tensor, index: int, pages: Sequence[int]) -> None:
    page_table[index] = -1
    page_table[index, : len(pages)] = torch.tensor(pages, dtype=torch.int32)


def _check_shape(state: SelectionState, layout: CacheLayout) -> None:
    expected = (layout.max_requests, layout.max_pages)
    if tuple(state.page_table.shape) != expected:
        raise ValueError(
            f"the selection state must have max_requests and max_pages of the layout, {expected}, "
            f"got {tuple(state.page_table.shape)}"
        )


def _check_prefix(donor: CacheRequest, shared: int, max_positions: int) -> None:
    if shared % PAGE_RECORDS or not 0 < shared <= donor.length:
        raise ValueError(
            f"a shared prefix is whole pages of {PAGE_RECORDS} of the donor's {donor.length} positions, got {shared}"
        )
    if shared >= max_positions:
        raise ValueError(f"max_positions must exceed the shared prefix of {shared}, got {max_positions}")
