"""The public object: a cache whose records all live on the host and whose recently selected ones on the device.

An engine drives it in a loop (examples/drive_the_cache.py): admit a request, stage its prompt's records,
then, step by step, append the new record of every layer and resolve the layer's selection to slots that
attention can read. The cache sees positions and bytes: no selector, model or dtype is named here.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from hisparse.admission import Admission, CacheRequest, State
from hisparse.backend import BackendOptions, new_backend
from hisparse.host_memory import Progress
from hisparse.host_pool import HostPool
from hisparse.integrity import check_cache
from hisparse.layout import CacheLayout
from hisparse.order import POLICIES
from hisparse.ranking import Best
from hisparse.resolve import as_bytes, check_positions, check_seeds, check_selection
from hisparse.selection_state import SelectionState
from hisparse.statistics import Statistics, count_up
from hisparse.step import Step, Steps
from hisparse.workspace import Source, Workspace


class SelectionObserver(Protocol):
    """Hears what layers select."""

    def hears(self, requests: Sequence[CacheRequest]) -> bool:
        """Whether it wants to hear of their next step; asked by whoever could replay a recorded one instead."""

    def selected(self, layer: int, selection: Tensor, step: Step, best: Best | None) -> None:
        """A layer's selection, int32 [b, k], before it is resolved, and what it was chosen from if that is known.

        Not called when a recorded step is replayed.
        """


class HierarchicalCache:
    """A hierarchical KV cache for top-k sparse attention.

    Args:
        layout: sizes, fixed for the cache's life.
        policy: which record leaves the device pool first: one of `hisparse.order.POLICIES`.
        device: where slots, tables and selections are. The reference backend serves any torch device.
        selection_state: the selector's pages, admitted, saved and released together with the request's.
        debug: check at every resolve that positions are distinct and inside the history (reads back).
        prefetch: fetch a shared layer's misses as soon as its anchor's are known, beside the caller's stream. False:
            when the layer comes. On a GPU only.
        io: False makes this the no-IO oracle, the bound that every scheme is measured against: tables move on, records
            do not, outputs are invalid.
        progress: called with (bytes done, bytes in all) while the host pool is pinned, which takes a second for 4 GB.
        host_pool: that of an earlier cache of the same layout, all of whose requests are retired, to save pinning anew.

    Raises:
        BuildError: the GPU's kernels cannot be compiled or loaded here.
        HostMemoryError, DeviceMemoryError: there is not so much memory. Nothing stays taken.
        ValueError: a policy that does not exist, or a selection state or host pool of another shape or in use.

    Design: docs/architecture.md; the idea is the HiSparse paper's (arXiv 2608.07009).
    """

    def __init__(
        self,
        layout: CacheLayout,
        *,
        policy: str = "lru",
        device: torch.device | str = "cpu",
        selection_state: SelectionState | None = None,
        debug: bool = False,
        prefetch: bool = True,
        io: bool = True,
        progress: Progress | None = None,
        host_pool: HostPool | None = None,
    ) -> None:
        self.layout = layout
        self.device = torch.empty(0, device=device).device  # 'cuda' becomes the 'cuda:0' that tensors name
        if policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(sorted(POLICIES))}, got {policy!r}")
        self.selection_state = selection_state
        self.debug = debug
        if host_pool is not None:
            host_pool.check_free(layout)
        options = BackendOptions(POLICIES[policy], prefetch, io, progress, host_pool)
        self.io = io
        self.backend = new_backend(layout, options, self.device)
        self.host_pool = self.backend.host_pool
        self.device_pool = self.backend.device_pool
        self.workspace = Workspace(layout, self.device)
        self.admission = Admission(layout, self.host_pool.pages, selection_state, self.device)
        self.observer: SelectionObserver | None = None
        self._steps = Steps(layout, self.admission, self.backend, self.device)

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
        self._steps.check_idle("retire")
        self.admission.check_member(request)
        self.backend.release(self.admission.own_rows(request))
        self.admission.retire(request)

    def retract(self, request: CacheRequest) -> None:
        """Take a request off the device: its slots, reservation and selection state are free for others.

        Its records stay on the host and its selection state is saved there, so that it resumes without
        computing anything again.
        """
        self._steps.check_idle("retract")
        self.admission.check_member(request, State.ACTIVE)
        self.backend.release(self.admission.own_rows(request))
        self.admission.retract(request)

    def resume(self, request: CacheRequest) -> None:
        """Put a retracted request back. Raises `CapacityError`, changing nothing, while there is no room."""
        self._steps.check_idle("resume")
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
        self._steps.check_idle("stage")
        self._check_layer(layer)
        self.admission.check_member(request, State.ACTIVE)
        raw = as_bytes(records, self.layout, self.device)
        end = start + raw.shape[0]
        self._check_staging(layer, request, start, end)
        if start == end:
            return
        self.backend.stage(layer, raw, self.admission.rows(request, start, end))
        request.staged[layer] = end
        request.length = min(request.staged)

    def history(self, layer: int, request: CacheRequest, end: int) -> Iterator[Tensor]:
        """Yield the records of positions 0 to `end` - 1, uint8 [<= 1024, record_bytes], on the device.

        They come from the host through the workspace, so a history may be larger than the device pool. A tile is valid
        until the next one is asked for. Layers are best read in ascending order: the next one's first tile is filled
        meanwhile.
        """
        self._check_layer(layer)
        self.admission.check_member(request, State.ACTIVE)
        if not 0 <= end <= request.staged[layer]:
            raise ValueError(f"end must be 0 to {request.staged[layer]}, the positions staged, got {end}")
        rows = self.admission.rows(request, 0, end)
        after = layer + 1
        has_after = after < self.layout.num_layers and end <= request.staged[after]
        return self.workspace.read(
            self._source(layer, request, rows), self._source(after, request, rows) if has_after else None
        )

    def has_slots_for_all(self, num_positions: int = 0) -> bool:
        """Whether every record of the requests on the device, and `num_positions` more, can have a slot at one time."""
        active = (request.length for request in self.requests if request.state is State.ACTIVE)
        return sum(active) + num_positions <= self.layout.num_slots

    def seed(self, request: CacheRequest, positions: Mapping[int, Tensor]) -> None:
        """Fetch what a request will probably select, before its first step.

        The top_k best are certain to be on the device then; of the others, some may have left for better ones.

        Args:
            request: an active one.
            positions: by layer (anchors alone), int32 [m] distinct positions of its history, the best first, -1 pads; m
                is at most `device_buffer_size`. They are counted as hits and misses like any others.

        Raises:
            ValueError: a layer that uses another's selection, or positions of another shape, dtype or device.
        """
        self._steps.check_idle("seed")
        self.admission.check_member(request, State.ACTIVE)
        for layer, best in positions.items():
            self._check_layer(layer)
            self._check_anchor(layer)
            check_seeds(best, self.layout, self.device)
            if self.debug:
                check_positions(best[None], torch.tensor([request.length], device=self.device), "positions")
        self._steps.seed(request, positions)

    # Decode

    def step(
        self,
        requests: Sequence[CacheRequest],
        *,
        tokens: Sequence[int] = (),
        batch_size: int | None = None,
        recorded: Step | None = None,
    ) -> AbstractContextManager[Step]:
        """One decode step: every request gets one more position, with a slot in every layer.

        Inside, call `append` and then `resolve` for each layer, or `follow` for one that shares a selection; or, with
        `recorded`, replay the graph that the step was recorded in, once, on the stream that is current here. If the
        body raises, the step is undone: no request has grown.

        Args:
            requests: active ones, no two the same, each below its capacity.
            tokens: one number a request for the caller's own use, uploaded with the rest: `Step.tokens`. Default: 0.
            batch_size: lines of the step; those beyond the requests are padded. Default: one a request.
            recorded: a step of `record_step`.

        Raises:
            ValueError: a request that cannot take part, a layer without `append`, or a recorded step that was not
                replayed exactly once. No request has grown.
            HiSparseError: the selections of the step did not fit the pool.
        """
        return self._steps.run(requests, tokens, batch_size, recorded)

    def record_step(self, batch_size: int) -> AbstractContextManager[Step]:
        """Record a decode step of up to `batch_size` requests in the CUDA graph that is being captured.

        Inside, call `append` and `resolve` for each layer as in `step`. Nothing of it waits for the CPU, and
        everything it forks is joined at its end. `step(requests, recorded=...)` fills its inputs for a replay.

            with torch.cuda.graph(graph), cache.record_step(8) as recorded:
                model(tokens, recorded.positions, attend)
            with cache.step(requests, recorded=recorded):
                graph.replay()

        Raises:
            ValueError: no GPU, no capture, or a batch size that the cache cannot have.
        """
        return self._steps.record(batch_size)

    def append(self, layer: int, records: Tensor) -> None:
        """Write the step's new records of one layer to their slots and through to the host pool.

        They are in their slots when the layer's `resolve`, or `follow`, is through.

        Args:
            layer: 0 to num_layers - 1.
            records: [b, ...] of any dtype, record_bytes bytes a line, one line a line of the step. Those of padded
                lines go nowhere.
        """
        step = self._steps.current("append")
        self._check_layer(layer)
        raw = as_bytes(records, self.layout, self.device)
        if raw.shape[0] != step.batch_size:
            raise ValueError(f"append takes {step.batch_size} records, one a request, got {raw.shape[0]}")
        self.backend.write_through(layer, raw, step.slots[self.layout.group_of[layer]], step.rows)
        self._steps.note_append(layer)

    def resolve(self, layer: int, selection: Tensor, best: Best | None = None) -> Tensor:
        """Bring every selected record into the device pool and say where it is.

        Args:
            layer: 0 to num_layers - 1, one that selects for itself.
            selection: int32 [b, k] positions, k <= top_k, distinct in a request, -1 pads. The newest
                position, whose record `append` takes, may be among them. Ascending order is best: neighbours in the
                host pool are then fetched together.
            best: gives the best positions, [b, n], of which `selection` is the top. The policy "two_rate_tier" asks it
                for 2k of them, beside the step; without it that policy is "two_rate".

        Returns:
            int32 [b, k] slots of `records(layer)`, -1 where the selection is negative or past the request's
            history. Valid until the step ends.

        Raises:
            ValueError: a selection of another shape, dtype or device, or a ranking; in debug mode also positions
                outside the history or named twice (not while a step is recorded).
        """
        step = self._steps.current("resolve")
        self._check_layer(layer)
        self._check_anchor(layer)
        self._steps.check_has_records(layer)
        check_selection(selection, self.layout, step.batch_size, self.device)
        if self.debug and step.requests:
            live = len(step.requests)
            check_positions(selection[:live], step.lengths[:live])
        if self.observer is not None and step.requests:
            self.observer.selected(layer, selection, step, best)
        page_table = self.admission.page_table
        slots = self.backend.resolve(layer, selection, step.request_index, step.lengths, page_table, best)
        self._steps.note_resolve(layer, slots)
        return slots

    def follow(self, layer: int) -> Tensor:
        """Bring a shared layer's records to the slots that its anchor's `resolve` handed out in this step.

        Args:
            layer: one that is not its own anchor (`CacheLayout.anchors`), after its `append`.

        Returns:
            The anchor's slots, int32 [b, k]; they hold in `records(layer)` what they hold in the anchor's.

        Raises:
            ValueError: a layer that selects for itself, or whose anchor was not resolved in this step.
        """
        self._steps.current("follow")
        self._check_layer(layer)
        anchor = self.layout.anchors[layer]
        if anchor == layer:
            raise ValueError(f"layer {layer} selects for itself: resolve it")
        self._steps.check_has_records(layer)
        slots = self._steps.slots_of(anchor)
        self.backend.follow(layer)
        return slots

    def records(self, layer: int) -> Tensor:
        """The layer's slots, uint8 [N, record_bytes]: what attention reads."""
        return self.device_pool.records[layer]

    # Looking inside

    @property
    def requests(self) -> list[CacheRequest]:
        """All requests that are not retired, in the order of their admission."""
        return self.admission.requests

    def statistics(self, layer: int | None = None) -> Statistics:
        """Totals since the start, of one layer or of all together. Does not wait for a step that runs.

        The layers of an index group hit and miss together; each is counted.
        """
        if layer is not None:
            self._check_layer(layer)
        return count_up(self.backend.read_counters(), self.layout, layer)

    def check_integrity(self) -> None:
        """Prove that no table contradicts another and no slot the host. Raises `IntegrityError` otherwise.

        Not inside a step, when new records have slots but are not written yet.
        """
        self._steps.check_idle("check_integrity")
        if not self.io:
            raise ValueError("a no-IO oracle moves no records: there is nothing to prove")
        check_cache(self)

    def _source(self, layer: int, request: CacheRequest, rows: Tensor) -> Source:
        return Source((layer, request, len(rows)), partial(self.backend.fetch, layer), rows)

    def _check_layer(self, layer: int) -> None:
        if not isinstance(layer, int):
            raise ValueError(f"layer must be a number, got {layer!r}")
        if not 0 <= layer < self.layout.num_layers:
            raise ValueError(f"layer must be 0 to {self.layout.num_layers - 1}, got {layer}")

    def _check_anchor(self, layer: int) -> None:
        if self.layout.anchors[layer] != layer:
            raise ValueError(f"layer {layer} uses the selection of layer {self.layout.anchors[layer]}: follow({layer})")

    def _check_staging(self, layer: int, request: CacheRequest, start: int, end: int) -> None:
        if start != request.staged[layer]:
            raise ValueError(
                f"layer {layer} has {request.staged[layer]} positions of this request: start must be that, got {start}"
            )
        if end > request.capacity:
            raise ValueError(
                f"positions {start} to {end - 1} are past the {request.capacity} that the request was admitted with"
            )
        anchor = self.layout.anchors[layer]
        if anchor != layer and end > request.staged[anchor]:
            raise ValueError(
                f"layer {layer} uses the slots of layer {anchor}, which has {request.staged[anchor]} positions of this "
                f"request: stage that one first"
            )
