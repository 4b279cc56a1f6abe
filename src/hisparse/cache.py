"""The public object: a cache whose records all live on the host and whose recently selected ones on the device.

An engine drives it in a loop (examples/drive_the_cache.py): admit a request, stage its prompt's records,
then, step by step, append the new record of every layer and resolve the layer's selection to slots that
attention can read. The cache sees positions and bytes: no selector, model or dtype is named here.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hisparse.admission import Admission, CacheRequest, State
from hisparse.backend import Backend, ReferenceBackend
from hisparse.errors import HiSparseError
from hisparse.host_pool import rows_of
from hisparse.integrity import check_cache
from hisparse.layout import CacheLayout
from hisparse.order import POLICIES, Policy
from hisparse.resolve import check_positions, check_selection
from hisparse.selection_state import SelectionState
from hisparse.workspace import Workspace


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
        self.layout = layout
        self.device = torch.empty(0, device=device).device  # 'cuda' becomes the 'cuda:0' that tensors name
        self.selection_state = selection_state
        self.debug = debug
        self.backend = _new_backend(layout, POLICIES[policy], self.device)
        self.host_pool = self.backend.host_pool
        self.device_pool = self.backend.device_pool
        self.workspace = Workspace(layout, self.device)
        self.admission = Admission(layout, self.host_pool.pages, selection_state, self.device)
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
        return self.admission.admit(max_positions, prefix)

    def can_admit(self, max_positions: int) -> bool:
        """Whether `admit` would succeed now. Raises `NeverFitsError` if it never will."""
        return self.admission.can_admit(max_positions)

    def retire(self, request: CacheRequest) -> None:
        """Let a request go: its slots, its host pages and its selection state are free again."""
        self._check_idle("retire")
        self.admission.check_member(request)
        self.backend.release(self.admission.own_rows(request))
        self.admission.retire(request)

    def retract(self, request: CacheRequest) -> None:
        """Take a request off the device: its slots, reservation and selection state are free for others.

        Its records stay on the host and its selection state is saved there, so that it resumes without
        computing anything again.
        """
        self._check_idle("retract")
        self.admission.check_member(request, State.ACTIVE)
        self.backend.release(self.admission.own_rows(request))
        self.admission.retract(request)

    def resume(self, request: CacheRequest) -> None:
        """Put a retracted request back. Raises `CapacityError`, changing nothing, while there is no room."""
        self._check_idle("resume")
        self.admission.check_member(request, State.RETRACTED)
        self.admission.resume(request)

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
        self.admission.check_member(request, State.ACTIVE)
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
        self.backend.stage(layer, raw, self.admission.rows(request, start, end))
        request.staged[layer] = end
        request.length = min(request.staged)

    def history(self, layer: int, request: CacheRequest, end: int) -> Iterator[Tensor]:
        """Yield the records of positions 0 to `end` - 1, uint8 [<= 1024, record_bytes], on the device.

        They come from the host through the workspace, so a history may be larger than the device pool. A
        tile is overwritten two tiles later.
        """
        self._check_layer(layer)
        self.admission.check_member(request, State.ACTIVE)
        if not 0 <= end <= request.staged[layer]:
            raise ValueError(f"end must be 0 to {request.staged[layer]}, the positions staged, got {end}")
        return self.workspace.read(partial(self.backend.fetch, layer), self.admission.rows(request, 0, end))

    # Decode

    @contextmanager
    def step(self, requests: Sequence[CacheRequest]) -> Iterator[Step]:
        """One decode step: every request gets one more position, with a slot in every layer.

        Inside, call `append` and then `resolve` for each layer. If the body raises, the step is undone:
        no request has grown.

        Args:
            requests: active ones, no two the same, each below its capacity.

        Raises:
            ValueError: a request that cannot take part, or a layer without `append`. No request has grown.
            HiSparseError: the selections of the step did not fit the pool.
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
        self.backend.write_through(layer, raw, step.slots[layer], step.rows)
        self._appended.add(layer)

    def resolve(self, layer: int, selection: Tensor) -> Tensor:
        """Bring every selected record into the device pool and say where it is.

        Args:
            layer: 0 to num_layers - 1.
            selection: int32 [b, k] positions, k <= top_k, distinct in a request, -1 pads. The newest
                position, whose record `append` takes, may be among them.

        Returns:
            int32 [b, k] slots of `records(layer)`, -1 where the selection is negative or past the request's
            history. Valid until the step ends.

        Raises:
            ValueError: a selection of another shape, dtype or device; in debug mode also positions outside
                the history or named twice.
        """
        step = self._current("resolve")
        self._check_layer(layer)
        if layer not in self._appended:
            raise ValueError(f"layer {layer} is resolved before `append` wrote the step's records: append first")
        check_selection(selection, self.layout, len(step.requests), self.device)
        if self.debug:
            check_positions(selection, step.lengths)
        known = selection.masked_fill(selection >= step.lengths[:, None], -1)
        return self.backend.resolve(layer, known, step.request_index, self.admission.page_table)

    def records(self, layer: int) -> Tensor:
        """The layer's slots, uint8 [N, record_bytes]: what attention reads."""
        return self.device_pool.records[layer]

    # Looking inside

    @property
    def requests(self) -> list[CacheRequest]:
        """All requests that are not retired, in the order of their admission."""
        return self.admission.requests

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
        self.admission.check_can_step(requests)
        request_index = torch.tensor([request.index for request in requests], device=self.device)
        positions = torch.tensor([request.length for request in requests], device=self.device)
        rows = rows_of(self.admission.page_table[request_index], positions[:, None])[:, 0]
        slots = self.backend.begin_step(rows)
        self._appended = set()
        self._failed_before = int(self.device_pool.counters.failed.sum())
        self._step = Step(tuple(requests), request_index, positions, positions + 1, rows, slots)
        return self._step

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
        self.backend.release(step.rows)

    # Checks, one a boundary

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


def _new_backend(layout: CacheLayout, policy: Policy, device: torch.device) -> Backend:
    if device.type == "cuda":
        from hisparse.kernels.backend import KernelBackend  # needs cuda-bindings

        return KernelBackend(layout, policy, device)
    return ReferenceBackend(layout, policy, device)
