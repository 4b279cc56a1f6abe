"""The public object: a cache whose records all live on the host and whose recently selected ones on the device.

An engine drives it in a loop (examples/drive_the_cache.py): admit a request, stage its prompt's records,
then, step by step, append the new record of every layer and resolve the layer's selection to slots that
attention can read. The cache sees positions and bytes: no selector, model or dtype is named here.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from hisparse import reference
from hisparse.device_pool import STEP_LIMIT, DevicePool
from hisparse.errors import CapacityError, HiSparseError, NeverFitsError
from hisparse.host_pool import HostPool, rows_of
from hisparse.integrity import check_cache
from hisparse.layout import PAGE_RECORDS, CacheLayout, num_pages_for
from hisparse.order import POLICIES
from hisparse.reference.rebuild_order import order_is_due
from hisparse.resolve import check_positions, check_selection
from hisparse.selection_state import SelectionState
from hisparse.workspace import Workspace


class State(Enum):
    """Where a request stands."""

    ACTIVE = "active"  # it has a reservation and can take part in steps
    RETRACTED = "retracted"  # its history is on the host; nothing of it is on the device
    RETIRED = "retired"  # it is gone


@dataclass(eq=False)
class CacheRequest:
    """A request's part of the cache. Made by `admit`; engines read it and hand it back."""

    capacity: int  # positions it may ever have
    pages: list[int]  # of the host pool
    state_pages: list[int]  # of the selection state
    length: int = 0  # positions whose records are complete in every layer
    state: State = State.ACTIVE
    index: int = -1  # its line in the page tables while active
    staged: list[int] = field(default_factory=list)  # positions staged so far, by layer
    saved_state: Tensor | None = None  # selection state while retracted


class Step(NamedTuple):
    """One decode step: what its new records and selections refer to."""

    requests: tuple[CacheRequest, ...]
    request_index: Tensor  # int64 [b], line of each request in the page tables
    positions: Tensor  # int64 [b], of the records that this step produces
    lengths: Tensor  # int64 [b], positions + 1
    rows: Tensor  # int64 [b], where those records go on the host
    slots: Tensor  # int64 [layers, b], and on the device


class Statistics(NamedTuple):
    """Totals over all layers since the start."""

    hits: int
    misses: int
    fetched_bytes: int
    order_rebuilds: int
    exhausted_orders: int

    @property
    def miss_rate(self) -> float:
        """Misses as a share of all selected positions; 0 if nothing was selected yet."""
        return self.misses / max(self.hits + self.misses, 1)


class HierarchicalCache:
    """A hierarchical KV cache for top-k sparse attention.

    Args:
        layout: sizes, fixed for the cache's life.
        policy: which record leaves the device pool first: "lru", "fifo" or "random".
        device: where slots, tables and selections are. The reference backend serves any torch device.
        selection_state: the selector's pages, admitted, saved and released together with the request's.
        debug: check at every resolve that positions are distinct and inside the history (reads back).

    Raises:
        ValueError: a policy that does not exist, or a selection state of another shape.

    Design: DESIGN.md sections 2 to 4; the idea is the HiSparse paper's (arXiv 2608.07009).
    """

    def __init__(
        self,
        layout: CacheLayout,
        *,
        policy: str = "lru",
        device: torch.device | str = "cpu",
        selection_state: SelectionState | None = None,
        debug: bool = False,
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(sorted(POLICIES))}, got {policy!r}")
        if selection_state is not None:
            _check_selection_state(selection_state, layout)
        self.layout = layout
        self.policy = POLICIES[policy]
        self.device = torch.empty(0, device=device).device  # 'cuda' becomes the 'cuda:0' that tensors name
        self.selection_state = selection_state
        self.debug = debug
        self.host_pool = HostPool(layout, pinned=self.device.type == "cuda")
        self.device_pool = DevicePool(layout, self.device)
        self.workspace = Workspace(layout, self.device)
        shape = (layout.max_requests, layout.max_pages)
        self.page_table = torch.full(shape, -1, dtype=torch.int32, device=self.device)
        self.requests: list[CacheRequest] = []  # all that are not retired
        self.step_number = 0
        self._free_index = list(range(layout.max_requests - 1, -1, -1))
        self._step: Step | None = None
        self._appended: set[int] = set()  # layers that got the step's records
        self._failed_before = 0  # counters.failed when the step began

    # Requests come and go

    def admit(self, max_positions: int, *, prefix: tuple[CacheRequest, int] | None = None) -> CacheRequest:
        """Reserve everything that a request of up to `max_positions` positions will need.

        Args:
            max_positions: prompt and output together.
            prefix: another request and how many of its first positions to share, a multiple of 64. The
                shared records are not copied; the new request starts with that length.

        Raises:
            NeverFitsError: it would not fit an empty cache either.
            CapacityError: it does not fit now. Nothing was taken.
            ValueError: a length below 1, or a prefix that cannot be shared.
        """
        self._check_can_ever_fit(max_positions)
        donor, shared = prefix or (None, 0)
        if donor is not None:
            self._check_member(donor, State.ACTIVE)
            _check_prefix(donor, shared, max_positions)
        num_shared = shared // PAGE_RECORDS
        num_new = num_pages_for(max_positions) - num_shared
        self._check_fits_now(num_new)
        request = CacheRequest(max_positions, self.host_pool.pages.allocate(num_new), [], length=shared)
        if self.selection_state is not None:
            request.state_pages = self.selection_state.pages.allocate(num_new)
        if donor is not None:
            self._share(request, donor, num_shared)
        request.staged = [shared] * self.layout.num_layers
        self._give_index(request)
        self.requests.append(request)
        return request

    def can_admit(self, max_positions: int) -> bool:
        """Whether `admit` would succeed now. Raises `NeverFitsError` if it never will."""
        self._check_can_ever_fit(max_positions)
        try:
            self._check_fits_now(num_pages_for(max_positions))
        except CapacityError:
            return False
        return True

    def retire(self, request: CacheRequest) -> None:
        """Let a request go: its slots, its host pages and its selection state are free again."""
        self._check_idle("retire")
        self._check_member(request)
        self._release_slots(request)
        if request.state is State.ACTIVE:
            self._leave_device(request)
        self.host_pool.pages.let_go(request.pages)
        request.pages, request.saved_state = [], None
        request.state = State.RETIRED
        self.requests.remove(request)

    def retract(self, request: CacheRequest) -> None:
        """Take a request off the device: its slots, reservation and selection state are free for others.

        Its records stay on the host and its selection state is saved there, so that it resumes without
        computing anything again.
        """
        self._check_idle("retract")
        self._check_member(request, State.ACTIVE)
        if self.selection_state is not None:
            request.saved_state = self.selection_state.save(request.state_pages)
        self._release_slots(request)
        self._leave_device(request)
        request.state = State.RETRACTED

    def resume(self, request: CacheRequest) -> None:
        """Put a retracted request back. Raises `CapacityError`, changing nothing, while there is no room."""
        self._check_idle("resume")
        self._check_member(request, State.RETRACTED)
        self._check_fits_now(0, num_state_pages=len(request.pages))
        if self.selection_state is not None and request.saved_state is not None:
            request.state_pages = self.selection_state.pages.allocate(len(request.pages))
            self.selection_state.restore(request.state_pages, request.saved_state)
        request.saved_state = None
        request.state = State.ACTIVE
        self._give_index(request)

    # Prefill

    def stage(self, layer: int, request: CacheRequest, start: int, records: Tensor) -> None:
        """Write the records of positions `start`, `start + 1`, ... of one layer.

        They go to the host pool, and to the device pool as far as slots are free. A position counts as
        part of the request's history once every layer has it.

        Args:
            layer: 0 to num_layers - 1.
            request: an active one.
            start: the first position; it must follow the last one staged in this layer.
            records: [n, ...] of any dtype, record_bytes bytes a line.

        Raises:
            ValueError: a gap or an overlap, too many positions, or records of another size.
        """
        self._check_idle("stage")
        self._check_layer(layer)
        self._check_member(request, State.ACTIVE)
        raw = self._as_bytes(records)
        end = start + raw.shape[0]
        if start != request.staged[layer]:
            raise ValueError(
                f"layer {layer} has {request.staged[layer]} positions of this request: start must be that, got {start}"
            )
        if end > request.capacity:
            raise ValueError(
                f"positions {start} to {end - 1} are past the {request.capacity} that the request was admitted with"
            )
        self._tick()
        reference.stage(
            self.device_pool.layer(layer),
            raw,
            self._rows(request, start, end),
            self.step_number,
            self.device_pool.records[layer],
            self.host_pool.records[layer],
        )
        request.staged[layer] = end
        request.length = min(request.staged)

    def history(self, layer: int, request: CacheRequest, end: int) -> Iterator[Tensor]:
        """Yield the records of positions 0 to `end` - 1, uint8 [<= 1024, record_bytes], on the device.

        They come from the host through the workspace, so a history may be larger than the device pool. A
        tile is overwritten two tiles later.
        """
        self._check_layer(layer)
        self._check_member(request, State.ACTIVE)
        if not 0 <= end <= request.staged[layer]:
            raise ValueError(f"end must be 0 to {request.staged[layer]}, the positions staged, got {end}")
        return self.workspace.read(self.host_pool.records[layer], self._rows(request, 0, end))

    # Decode

    @contextmanager
    def step(self, requests: Sequence[CacheRequest]) -> Iterator[Step]:
        """One decode step: every request gets one more position, with a slot in every layer.

            Inside, call `append` and then `resolve` for each layer. If the body raises, the step is undone:
            no request has grown.

            Args:
                requests: active ones, no two the same, each below its capacity.

            Raises:
        XX: the selections of the step did not fit the pool.
        """
        step = self._begin(requests)
        try:
            yield step
        except BaseException:
            self._undo(step)
            raise
        finally:
            self._step = None
        self._end(step)

    def append(self, layer: int, records: Tensor) -> None:
        """Write the step's new records of one layer to their slots and through to the host pool.

        Args:
            layer: 0 to num_layers - 1.
            records: [b, ...] of any dtype, record_bytes bytes a line, one line a request of the step.
        """
        step = self._current("append")
        self._check_layer(layer)
        raw = self._as_bytes(records)
        if raw.shape[0] != len(step.requests):
            raise ValueError(f"append takes {len(step.requests)} records, one a request, got {raw.shape[0]}")
        pool, host = self.device_pool.records[layer], self.host_pool.records[layer]
        reference.write_through(raw, step.slots[layer], step.rows, pool, host)
        self._appended.add(layer)

    def resolve(self, layer: int, selection: Tensor) -> Tensor:
        """Bring every selected record into the device pool and say where it is.

        Args:
            layer: 0 to num_layers - 1.
            selection: int32 [b, k] positions, k <= top_k, distinct in a request, -1 pads. The newest
                position, whose record `append` takes, may be among them.

        Returns:
            int32 [b, k] slots of `records(layer)`, -1 where the selection is -1. Valid until the step ends.

        Raises:
            ValueError: a selection of another shape, dtype or device; in debug mode also positions outside
                the history or named twice.
        """
        step = self._current("resolve")
        self._check_layer(layer)
        check_selection(selection, self.layout, len(step.requests), self.device)
        if self.debug:
            check_positions(selection, step.lengths)
        tables = self.device_pool.layer(layer)
        rows = rows_of(self.page_table[step.request_index], selection)
        pool, host = self.device_pool.records[layer], self.host_pool.records[layer]
        resolved = reference.resolve(tables, rows, self.step_number, self.policy, host, pool)
        self._count(layer, resolved)
        if order_is_due(tables, self.policy):
            reference.rebuild_order(tables, self.step_number, self.policy, 2 * self.step_number + 1)
            self.device_pool.counters.rebuilds[layer] += 1
        return resolved.slots

    def records(self, layer: int) -> Tensor:
        """The layer's slots, uint8 [N, record_bytes]: what attention reads."""
        return self.device_pool.records[layer]

    # Looking inside

    def statistics(self) -> Statistics:
        """Totals over all layers since the start."""
        counters = self.device_pool.counters
        misses = int(counters.misses.sum())
        return Statistics(
            hits=int(counters.hits.sum()),
            misses=misses,
            fetched_bytes=misses * self.layout.record_bytes,
            order_rebuilds=int(counters.rebuilds.sum()),
            exhausted_orders=int(counters.exhausted.sum()),
        )

    def check_integrity(self) -> None:
        """Prove that no table contradicts another and no slot the host. Raises `IntegrityError` otherwise.

        Not inside a step, when new records have slots but are not written yet.
        """
        self._check_idle("check_integrity")
        check_cache(self)

    # Steps

    def _begin(self, requests: Sequence[CacheRequest]) -> Step:
        self._check_idle("step")
        self._check_can_step(requests)
        self._tick()
        request_index = torch.tensor([request.index for request in requests], device=self.device)
        positions = torch.tensor([request.length for request in requests], device=self.device)
        rows = rows_of(self.page_table[request_index], positions[:, None])[:, 0]
        slots = torch.stack([self._insert(layer, rows) for layer in range(self.layout.num_layers)])
        self._appended = set()
        self._failed_before = int(self.device_pool.counters.failed.sum())
        self._step = Step(tuple(requests), request_index, positions, positions + 1, rows, slots)
        return self._step

    def _tick(self) -> None:
        """What enters from now on is newer than all that is here."""
        if self.step_number >= STEP_LIMIT:
            self.step_number = self.device_pool.rebase_stamps()
        self.step_number += 1

    def _insert(self, layer: int, rows: Tensor) -> Tensor:
        tables = self.device_pool.layer(layer)
        slots, exhausted = reference.insert(tables, rows, self.step_number, self.policy)
        self.device_pool.counters.exhausted[layer] += exhausted
        return slots

    def _end(self, step: Step) -> None:
        missing = set(range(self.layout.num_layers)) - self._appended
        failed = int(self.device_pool.counters.failed.sum()) - self._failed_before
        if missing or failed:
            self._undo(step)
        if missing:
            raise ValueError(
                f"the step ended without `append` for layers {sorted(missing)}: every layer needs its record"
            )
        if failed:
            raise HiSparseError(
                f"{failed} selected records found no slot: more positions were resolved in one step than the "
                f"device pool has slots ({self.layout.num_slots} a layer). Resolve each layer once a step"
            )
        for request in step.requests:
            request.length += 1
            request.staged = [request.length] * self.layout.num_layers

    def _undo(self, step: Step) -> None:
        """Free the slots that the step's new records took; the records themselves never counted."""
        for layer in range(self.layout.num_layers):
            reference.release(self.device_pool.layer(layer), step.rows)

    def _count(self, layer: int, resolved: reference.Resolved) -> None:
        counters = self.device_pool.counters
        counters.hits[layer] += resolved.hits
        counters.misses[layer] += resolved.misses
        counters.exhausted[layer] += resolved.exhausted
        counters.failed[layer] += resolved.failed

    # Requests

    def _share(self, request: CacheRequest, donor: CacheRequest, num_shared: int) -> None:
        """Put the donor's first pages before the request's own."""
        self.host_pool.pages.hold(donor.pages[:num_shared])
        request.pages = donor.pages[:num_shared] + request.pages
        if self.selection_state is not None:
            self.selection_state.pages.hold(donor.state_pages[:num_shared])
            request.state_pages = donor.state_pages[:num_shared] + request.state_pages

    def _give_index(self, request: CacheRequest) -> None:
        request.index = self._free_index.pop()
        _write_line(self.page_table, request.index, request.pages)
        if self.selection_state is not None:
            _write_line(self.selection_state.page_table, request.index, request.state_pages)

    def _release_slots(self, request: CacheRequest) -> None:
        """Free the slots of rows that no other request holds."""
        own = torch.tensor(self.host_pool.pages.held_once(request.pages), dtype=torch.int64, device=self.device)
        rows = (own[:, None] * PAGE_RECORDS + torch.arange(PAGE_RECORDS, device=self.device)).flatten()
        for layer in range(self.layout.num_layers):
            reference.release(self.device_pool.layer(layer), rows)

    def _leave_device(self, request: CacheRequest) -> None:
        """Free the selection state and the reservation."""
        if self.selection_state is not None:
            self.selection_state.pages.let_go(request.state_pages)
            self.selection_state.page_table[request.index] = -1
            request.state_pages = []
        self.page_table[request.index] = -1
        self._free_index.append(request.index)
        request.index = -1

    def _rows(self, request: CacheRequest, start: int, end: int) -> Tensor:
        positions = torch.arange(start, end, device=self.device)
        return rows_of(self.page_table[request.index], positions)

    # Checks, one a boundary

    def _check_can_ever_fit(self, max_positions: int) -> None:
        if max_positions < 1:
            raise ValueError(f"max_positions must be at least 1, got {max_positions}")
        layout = self.layout
        limit = min(layout.max_positions, layout.num_rows)
        if self.selection_state is not None:
            limit = min(limit, len(self.selection_state.pages.references) * PAGE_RECORDS)
        if max_positions > limit:
            raise NeverFitsError(
                f"a request of {max_positions} positions can never fit: one request can have {limit} "
                f"(host pool {layout.num_rows} rows, {layout.max_positions} positions a request). "
                f"Shorten it, or build the cache with more host pages"
            )

    def _check_fits_now(self, num_pages: int, num_state_pages: int | None = None) -> None:
        if not self._free_index:
            raise CapacityError(
                f"all {self.layout.max_requests} reservations of the device pool are taken; wait for one"
            )
        pools = [("host", self.host_pool.pages.num_free, num_pages)]
        if self.selection_state is not None:
            wanted = num_pages if num_state_pages is None else num_state_pages
            pools.append(("selection-state", self.selection_state.pages.num_free, wanted))
        for name, free, wanted in pools:
            if wanted > free:
                raise CapacityError(f"{wanted} {name} pages are needed and {free} are free; wait for some")

    def _check_can_step(self, requests: Sequence[CacheRequest]) -> None:
        if not requests:
            raise ValueError("a step needs at least one request")
        if len({id(request) for request in requests}) != len(requests):
            raise ValueError("a request can take part in a step only once")
        for request in requests:
            self._check_member(request, State.ACTIVE)
            if len(set(request.staged)) != 1:
                raise ValueError(f"a request's layers are staged unevenly, {request.staged}: finish its chunk first")
            if request.length >= request.capacity:
                raise ValueError(f"a request has used all {request.capacity} positions that it was admitted with")

    def _check_member(self, request: CacheRequest, state: State | None = None) -> None:
        if request not in self.requests:
            raise ValueError(f"this request is not in the cache (it is {request.state.value})")
        if state is not None and request.state is not state:
            raise ValueError(f"this needs a request that is {state.value}, got one that is {request.state.value}")

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.layout.num_layers:
            raise ValueError(f"layer must be 0 to {self.layout.num_layers - 1}, got {layer}")

    def _check_idle(self, call: str) -> None:
        if self._step is not None:
            raise ValueError(f"{call} cannot be called inside a step: leave the `with cache.step(...)` block first")

    def _current(self, call: str) -> Step:
        if self._step is None:
            raise ValueError(f"{call} belongs inside `with cache.step(requests):`")
        return self._step

    def _as_bytes(self, records: Tensor) -> Tensor:
        """The records as uint8 [n, record_bytes], whatever their shape and dtype."""
        raw = records.contiguous().view(records.shape[0], math.prod(records.shape[1:])).view(torch.uint8)
        if raw.shape[1] != self.layout.record_bytes:
            raise ValueError(
                f"a record has {self.layout.record_bytes} bytes in this cache, got {raw.shape[1]} "
                f"from {records.dtype} {list(records.shape)}"
            )
        return raw


def _write_line(page_table: Tensor, index: int, pages: Sequence[int]) -> None:
    page_table[index] = -1
    page_table[index, : len(pages)] = torch.tensor(pages, dtype=torch.int32)


def _check_selection_state(state: SelectionState, layout: CacheLayout) -> None:
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
