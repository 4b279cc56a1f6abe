"""Sizes are derived in one place, equal what is allocated, and refuse what cannot work."""

import re
from dataclasses import FrozenInstanceError

import pytest
import torch

from hisparse.device_pool import DevicePool
from hisparse.errors import DeviceMemoryError
from hisparse.kernels.state import new_launch_state, new_miss_plan
from hisparse.layout import INT32_LIMIT, CacheLayout, num_pages_for
from tests.caches import SMALL, default_device, small_cache, small_layout, small_state


@pytest.mark.parametrize(("positions", "pages"), [(0, 0), (1, 1), (63, 1), (64, 1), (65, 2), (128, 2), (6401, 101)])
def test_num_pages_for(positions: int, pages: int) -> None:
    assert num_pages_for(positions) == pages


def test_defaults_follow_from_the_other_sizes() -> None:
    layout = small_layout()
    assert (layout.num_slots, layout.max_positions, layout.max_pages, layout.num_rows) == (12, 512, 8, 512)
    assert small_layout(num_slots=20, max_positions=65).num_slots == 20
    assert small_layout(max_positions=65).max_pages == 2


def test_sizes_of_glm_like_records() -> None:
    layout = CacheLayout(
        num_layers=10, record_bytes=1152, top_k=2048, device_buffer_size=4096, max_requests=4, num_pages=1000
    )
    assert layout.slots_bytes == 10 * 4 * 4096 * 1152
    assert layout.workspace_bytes == 2 * 1024 * 1152
    assert layout.device_kv_bytes == layout.slots_bytes + layout.workspace_bytes
    assert layout.host_bytes == 10 * 64_000 * 1152
    assert layout.full_kv_bytes(131_072) == 10 * 131_072 * 1152


def test_the_pools_have_the_sizes_that_the_layout_says() -> None:
    cache = small_cache(num_slots=17, max_positions=100)
    layout = cache.layout
    assert cache.device_pool.records.nbytes == layout.slots_bytes
    assert cache.workspace._tiles.nbytes == layout.workspace_bytes
    assert cache.host_pool.records.nbytes == layout.host_bytes
    assert cache.admission.page_table.shape == (layout.max_requests, layout.max_pages)
    cache.check_integrity()


def test_a_device_pool_that_no_memory_can_hold_is_refused() -> None:
    layout = small_layout(device_buffer_size=2**29, record_bytes=2**20)
    with pytest.raises(DeviceMemoryError, match=r"1,073,741,824 slots in each of 2 layers take .* GB on cpu.*lower"):
        DevicePool(layout, torch.device("cpu"))


def test_table_bytes_are_those_of_the_tables() -> None:
    cache = small_cache(num_slots=17, max_positions=100)
    pool = cache.device_pool
    tables = [*pool.tables, pool.all_counters, cache.admission.page_table]
    tables += [cache._steps._recorded_inputs, cache._steps._padded_inputs]
    assert cache.layout.table_bytes == sum(table.nbytes for table in tables)


@pytest.mark.parametrize("anchors", [(0, 1, 2), (0, 0, 2)])
def test_launch_bytes_are_those_of_the_kernels_state(anchors: tuple[int, ...]) -> None:
    layout = small_layout(num_layers=3, anchors=anchors)
    state = new_launch_state(len(layout.groups), default_device())
    num_followed = len(anchors) - len(layout.groups)
    plan = new_miss_plan(layout.max_requests * layout.top_k, default_device())
    plan_bytes = sum(tensor.nbytes for tensor in plan)
    assert layout.launch_bytes == sum(tensor.nbytes for tensor in state) + num_followed * plan_bytes


@pytest.mark.parametrize("anchors", [(0, 1, 2), (0, 0, 2)])
def test_heat_bytes_are_those_of_the_heat(anchors: tuple[int, ...]) -> None:
    layout = small_layout(num_layers=3, anchors=anchors)
    state = new_launch_state(len(layout.groups), default_device(), heated_rows=layout.num_rows)
    assert layout.heat_bytes == state.heat.nbytes == 8 * len(set(anchors)) * layout.num_rows


def test_selection_state_bytes_are_those_of_the_state() -> None:
    layout = small_layout(max_positions=100)
    state = small_state(layout, num_layers=5, page_shape=(3, 7))
    page_bytes = 3 * 7 * torch.float32.itemsize
    assert layout.selection_state_bytes(5, page_bytes) == state.data.nbytes + state.page_table.nbytes


def test_it_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        small_layout().top_k = 3  # type: ignore[misc]


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("value", [0, -1, 2.0, True, "8"])
def test_sizes_are_positive_whole_numbers(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{name} must be a positive whole number, got {value!r}")):
        CacheLayout(**(SMALL | {name: value}))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["num_pages", "max_requests", "device_buffer_size"])
def test_a_size_that_is_none_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a positive whole number, got None"):
        CacheLayout(**(SMALL | {name: None}))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["max_positions", "num_slots"])
@pytest.mark.parametrize("value", [-1, 1.5])
def test_sizes_with_a_default_are_checked_as_well(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{name} must be a positive whole number, got {value!r}")):
        CacheLayout(**(SMALL | {name: value}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"record_bytes": 40}, "record_bytes must be a multiple of 16, got 40: pad the record"),
        ({"device_buffer_size": 4}, "got device_buffer_size 4 with top_k 4: ask for at least 5"),
        ({"top_k": 9}, "got device_buffer_size 6 with top_k 9: ask for at least 10"),
        ({"num_slots": 11}, "num_slots must hold max_requests * device_buffer_size = 12 slots, got 11"),
        ({"num_slots": INT32_LIMIT + 1}, "num_slots must stay below 2**31 (the tables are int32), got 2147483648"),
        ({"num_pages": 2**25}, "host rows must stay below 2**31 (the tables are int32), got 2147483648"),
    ],
    ids=str,
)
def test_sizes_that_cannot_work_together(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        small_layout(**changes)


def test_sizes_at_the_limits_work() -> None:
    layout = small_layout(device_buffer_size=5, num_pages=2**25 - 1, num_slots=INT32_LIMIT)
    assert layout.num_rows == 2**31 - 64
