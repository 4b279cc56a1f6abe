"""Shapes and sizes of records, pools and tables: every byte count that the package prints comes from here.

Fed by the configuration and a model's shape; read by the pools, which allocate exactly these sizes, and by
the statistics. Nothing here allocates.
"""

from dataclasses import dataclass
from functools import cached_property

PAGE_RECORDS = 64  # records in a page of the host pool
TILE_RECORDS = 1024  # records in a tile of the prefill workspace
NUM_TILES = 2  # one is read while the next is filled
RECORD_ALIGNMENT = 16  # bytes; the GPU moves records in loads of this size
CONTROL_BYTES = 128  # a group's, see kernels/state.py
BINS_BYTES = 48 * 1024  # of a group's order while it is made, see kernels/state.py
INT32_LIMIT = 2**31 - 1  # rows and slots are int32 in every table


def num_pages_for(num_positions: int) -> int:
    """Pages of the host pool that `num_positions` records take."""
    return -(-num_positions // PAGE_RECORDS)


@dataclass(frozen=True)
class CacheLayout:
    """The fixed shape of a `HierarchicalCache`.

    Args:
        num_layers: layers of the cache; each has its own device pool and its own part of the host pool.
        record_bytes: bytes of one record, a multiple of 16.
        top_k: the largest number of positions a selection may name.
        device_buffer_size: B, the slots that admission counts for each request in every layer; B > top_k.
        max_requests: requests that can be on the device at once.
        num_pages: pages of the host pool, 64 records each, shared by all requests.
        max_positions: the longest history that one request can have. Default: the whole host pool.
        num_slots: N, slots of each layer's device pool. Default: max_requests * device_buffer_size.
        anchors: for each layer the one whose selection it uses, itself or an earlier one. Default: each its own.

    Raises:
        ValueError: a size that cannot work, with the reason.
    """

    num_layers: int
    record_bytes: int
    top_k: int
    device_buffer_size: int
    max_requests: int
    num_pages: int
    max_positions: int = 0
    num_slots: int = 0
    anchors: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self._check_positive()
        if not self.max_positions:
            object.__setattr__(self, "max_positions", self.num_pages * PAGE_RECORDS)
        if not self.num_slots:
            object.__setattr__(self, "num_slots", self.max_requests * self.device_buffer_size)
        object.__setattr__(self, "anchors", tuple(self.anchors) or tuple(range(self.num_layers)))
        self._check_relations()
        self._check_anchors()

    def _check_positive(self) -> None:
        for name in [name for name in self.__dataclass_fields__ if name != "anchors"]:
            value = getattr(self, name)
            is_default = name in ("max_positions", "num_slots") and value == 0
            if not isinstance(value, int) or isinstance(value, bool) or (value < 1 and not is_default):
                raise ValueError(f"{name} must be a positive whole number, got {value!r}")

    def _check_relations(self) -> None:
        if self.record_bytes % RECORD_ALIGNMENT:
            raise ValueError(
                f"record_bytes must be a multiple of {RECORD_ALIGNMENT}, got {self.record_bytes}: pad the record"
            )
        if self.device_buffer_size <= self.top_k:
            raise ValueError(
                f"device_buffer_size must be above top_k (the selection and the newest record must fit), "
                f"got device_buffer_size {self.device_buffer_size} with top_k {self.top_k}: "
                f"ask for at least {self.top_k + 1}, twice top_k is a good start"
            )
        needed = self.max_requests * self.device_buffer_size
        if self.num_slots < needed:
            raise ValueError(
                f"num_slots must hold max_requests * device_buffer_size = {needed} slots, got {self.num_slots}"
            )
        for name, value in (("num_slots", self.num_slots), ("host rows", self.num_rows)):
            if value > INT32_LIMIT:
                raise ValueError(f"{name} must stay below 2**31 (the tables are int32), got {value}")

    def _check_anchors(self) -> None:
        if len(self.anchors) != self.num_layers:
            raise ValueError(f"anchors must name one for each of {self.num_layers} layers, got {len(self.anchors)}")
        for layer, anchor in enumerate(self.anchors):
            if not isinstance(anchor, int) or isinstance(anchor, bool):
                raise ValueError(f"anchors must be layers, whole numbers, got {anchor!r}")
            if not 0 <= anchor <= layer or self.anchors[anchor] != anchor:
                raise ValueError(
                    f"layer {layer}'s anchor must be itself or an earlier layer that is its own anchor, got {anchor}"
                )

    @property
    def groups(self) -> tuple[int, ...]:
        """The anchors, ascending: an index group each, with tables of its own."""
        return tuple(layer for layer, anchor in enumerate(self.anchors) if layer == anchor)

    @cached_property
    def group_of(self) -> tuple[int, ...]:
        """For each layer, which of `groups` it belongs to."""
        return tuple(self.groups.index(anchor) for anchor in self.anchors)

    def shared_layers(self, anchor: int) -> tuple[int, ...]:
        """The layers that use another layer's selection, ascending."""
        return tuple(layer for layer, own in enumerate(self.anchors) if own == anchor and layer != anchor)

    @property
    def num_rows(self) -> int:
        """Rows of the host pool in each layer."""
        return self.num_pages * PAGE_RECORDS

    @property
    def max_pages(self) -> int:
        """Pages of the longest request: the width of the page table."""
        return num_pages_for(self.max_positions)

    @property
    def slots_bytes(self) -> int:
        """Device bytes of all slots of all layers."""
        return self.num_layers * self.num_slots * self.record_bytes

    @property
    def workspace_bytes(self) -> int:
        """Device bytes of the prefill tiles."""
        return NUM_TILES * TILE_RECORDS * self.record_bytes

    @property
    def device_kv_bytes(self) -> int:
        """Device bytes that hold KV: slots and workspace. Fixed at start."""
        return self.slots_bytes + self.workspace_bytes

    @property
    def host_bytes(self) -> int:
        """Host bytes of all records of all layers."""
        return self.num_layers * self.num_rows * self.record_bytes

    @property
    def table_bytes(self) -> int:
        """Device bytes of the tables, on any device.

        In every group an int32 a row, five a slot and four more, and five int64 counters; the page table; five int64 a
        request, the inputs of recorded steps, and what they are between steps.
        """
        per_group = 4 * self.num_rows + 4 * 5 * self.num_slots + 4 * 4 + 8 * 5
        return len(self.groups) * per_group + self.page_table_bytes + 2 * 8 * 5 * self.max_requests

    @property
    def launch_bytes(self) -> int:
        """Device bytes that the kernels keep between launches, beside the tables; on a GPU only.

        In every group a control block and the order's bins; for each anchor that others follow a miss plan.
        """
        followed = sum(bool(self.shared_layers(anchor)) for anchor in self.groups)
        plan = 4 * (2 * self.max_requests * self.top_k + 1)
        return len(self.groups) * (CONTROL_BYTES + BINS_BYTES) + followed * plan

    @property
    def heat_bytes(self) -> int:
        """Device bytes of the rows' heat, two int32 a row in every group; with a policy that ranks by heat."""
        return len(self.groups) * 2 * 4 * self.num_rows

    @property
    def page_table_bytes(self) -> int:
        """Device bytes of a page table, an int32 a page of each request."""
        return 4 * self.max_requests * self.max_pages

    def selection_state_bytes(self, num_state_layers: int, page_bytes: int) -> int:
        """Device bytes of a selection state that has a page for each of the host pool's.

        One more page is scratch, and there is a page table of its own.

        Args:
            num_state_layers: layers that keep state.
            page_bytes: of one page (64 positions) in one layer.
        """
        return num_state_layers * (self.num_pages + 1) * page_bytes + self.page_table_bytes

    def full_kv_bytes(self, num_positions: int) -> int:
        """Bytes that `num_positions` records take in all layers: what a resident cache would hold."""
        return self.num_layers * num_positions * self.record_bytes
