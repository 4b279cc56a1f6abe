"""What the plan says is what the cache allocates, to the byte, for every family."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hisparse.backend import ReferenceBackend
from hisparse.cache import HierarchicalCache
from hisparse.checkpoint import load
from hisparse.config import HiSparseConfig
from hisparse.engine import build_engine
from hisparse.engine.family import state_of
from hisparse.engine.meter import Meter
from hisparse.kernels.state import new_launch_state, new_miss_plan
from hisparse.order import POLICIES
from hisparse.plan.footprint import Footprint, footprint, per_token, resident_bytes
from hisparse.plan.question import DTYPES
from tests.plan.families import EVERY_FAMILY, FP8_KEYS, ask_named, ask_tiny, write_family

CONTEXT, REQUESTS = 650, 3  # ten pages and a bit
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in EVERY_FAMILY},
    "own sizes": ("qwen2", {"top_k": 96, "device_buffer_size": 200}),
    "a selection each head": ("qwen3", {"quest_per_kv_head": True}),
    "every position": ("llama", {"selector": "all", "top_k": CONTEXT}),
    "fp8 records": ("deepseek-v3.2", {"kv_cache_dtype": "fp8"}),
    "fp8 records of shared layers": ("glm-5.2", {"kv_cache_dtype": "fp8", "top_k": 48}),
    "fp8 index keys": ("deepseek-v3.2", {"index_cache_dtype": "fp8"}),
    "fp8 index keys of shared layers, and fp8 records": (
        "glm-5.2",
        {"index_cache_dtype": "fp8", "kv_cache_dtype": "fp8"},
    ),
    "heat": ("llama", {"policy": "two_rate"}),
    "heat of index groups": ("glm-5.2", {"policy": "two_rate"}),
}


def planned(folder: Path, keys: dict[str, Any], dtype: str = "float32") -> Footprint:
    """From config.json alone, for as many requests as the cache will have."""
    question = ask_tiny(folder, HiSparseConfig.from_mapping(keys), context=str(CONTEXT), dtype=dtype)
    return question.footprint(REQUESTS, min(question.reservations))


def cache_of(folder: Path, keys: dict[str, Any], dtype: str = "float32", device: str = "cpu") -> HierarchicalCache:
    config = HiSparseConfig.from_mapping(keys | {"max_running_requests": REQUESTS})
    loaded = load(folder, dtype=DTYPES[dtype], device=device)
    return build_engine(loaded, config, [CONTEXT] * REQUESTS).runner.cache


def check_bytes(cache: HierarchicalCache, size: Footprint) -> None:
    """Every tensor that the cache holds, but for what kernels keep."""
    layout, state = size.layout, state_of(cache)
    assert layout == cache.layout
    assert layout.slots_bytes == cache.device_pool.records.nbytes
    assert layout.workspace_bytes == cache.workspace._tiles.nbytes
    tables = [*cache.device_pool.tables, cache.device_pool.all_counters, cache.admission.page_table]
    assert layout.table_bytes == sum(table.nbytes for table in tables) + 2 * cache._steps._recorded_inputs.nbytes
    assert size.selection_state_bytes == state.data.nbytes + state.page_table.nbytes
    assert size.host_bytes == cache.host_pool.records.nbytes


def heat_bytes_of(cache: HierarchicalCache) -> int:
    """Of the reference backend's heat, and of the steps that it is of."""
    assert isinstance(cache.backend, ReferenceBackend)
    heat = cache.backend.heat
    return heat._heat.nbytes + heat._step.nbytes if heat is not None else 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_bytes_are_those_of_the_cache(variant: str, tmp_path: Path) -> None:
    name, keys = VARIANTS[variant]
    folder = write_family(tmp_path / "tiny", name)
    for dtype in ("float32", "bfloat16"):
        cache, size = cache_of(folder, keys, dtype), planned(folder, keys, dtype)
        check_bytes(cache, size)
        assert size.heat_bytes == heat_bytes_of(cache)


@pytest.mark.parametrize("policy", POLICIES)
def test_heat_is_counted_with_the_policies_that_rank_by_it(policy: str, tmp_path: Path) -> None:
    folder = write_family(tmp_path / "tiny", "llama")
    cache, size = cache_of(folder, {"policy": policy}), planned(folder, {"policy": policy})
    assert size.heat_bytes == heat_bytes_of(cache) == Meter(cache, policy).summary()["heat_bytes"]
    assert (size.heat_bytes > 0) == policy.startswith("two_rate")
    assert size.device_bytes - planned(folder, {}).device_bytes == size.heat_bytes


@pytest.mark.parametrize("name", EVERY_FAMILY)
def test_launch_bytes_are_those_that_the_kernels_would_keep(name: str, tmp_path: Path) -> None:
    size = planned(write_family(tmp_path / "tiny", name), {})
    layout = size.layout
    state = new_launch_state(len(layout.groups), torch.device("cpu"))
    plans = [
        new_miss_plan(layout.max_requests * layout.top_k, torch.device("cpu"))
        for anchor in layout.groups
        if layout.shared_layers(anchor)
    ]
    tensors = [*state, *(tensor for plan in plans for tensor in plan)]
    assert layout.launch_bytes == sum(tensor.nbytes for tensor in tensors)
    parts = layout.device_kv_bytes + layout.table_bytes + layout.launch_bytes + size.selection_state_bytes
    assert size.device_bytes == parts
    assert planned(tmp_path / "tiny", {"policy": "two_rate"}).device_bytes == parts + layout.heat_bytes


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["lru", "two_rate"])
@pytest.mark.parametrize("name", EVERY_FAMILY)
def test_bytes_are_those_of_the_cache_on_a_gpu(name: str, policy: str, tmp_path: Path) -> None:
    from hisparse.kernels.backend import KernelBackend

    folder = write_family(tmp_path / "tiny", name)
    cache, size = cache_of(folder, {"policy": policy}, device="cuda"), planned(folder, {"policy": policy})
    check_bytes(cache, size)
    assert isinstance(cache.backend, KernelBackend)
    plans = [tensor for plan in cache.backend._plans.values() for tensor in plan]
    kept = sum(tensor.nbytes for tensor in (*cache.backend._state, *plans))
    assert size.layout.launch_bytes + size.heat_bytes == kept


@pytest.mark.parametrize("name", ["llama", "glm-5.2"])
def test_page_tables_are_as_wide_as_the_longest_request(name: str, tmp_path: Path) -> None:
    loaded = load(write_family(tmp_path / "tiny", name))

    def widths(sizes: list[int], **keys: float) -> set[int]:
        config = HiSparseConfig.from_mapping({"max_running_requests": 4, "top_k": 48} | keys)
        cache = build_engine(loaded, config, sizes).runner.cache
        return {cache.admission.page_table.shape[1], state_of(cache).page_table.shape[1]}

    assert widths([650, 30, 100, 640]) == {11}
    assert widths([650], host_to_device_ratio=20) == {11}  # a host pool of 120 pages
    assert widths([650], host_to_device_ratio=1) == {6}  # and one of 6, which are all that a request can have
    assert widths([], host_to_device_ratio=1) == {6}


def test_tables_grow_with_the_requests_and_not_with_their_square() -> None:
    family = ask_named().family
    one, two, three = (footprint(family, 131_072, n, 4096).layout.table_bytes for n in (1, 2, 3))
    assert three - two == two - one


def test_no_weights_are_read(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "tiny", "glm-5.2")
    before = planned(folder, {})
    for path in folder.iterdir():
        if path.name != "config.json":
            path.unlink()
    assert planned(folder, {}) == before


@pytest.mark.parametrize(
    ("name", "config", "dtype", "sizes"),
    [
        ("glm-5.1", None, "bfloat16", (78 * 1152, 78 * 256, 78 * 4)),
        ("glm-5.1", FP8_KEYS, "bfloat16", (78 * 1152, 78 * 132, 78 * 4)),
        ("glm-5.2", FP8_KEYS, "bfloat16", (78 * 1152, 21 * 132, 21 * 4)),
        ("deepseek-v3.2", None, "float32", (61 * 2304, 61 * 512, 61 * 4)),
    ],
)
def test_bytes_of_a_token(name: str, config: HiSparseConfig | None, dtype: str, sizes: tuple[int, int, int]) -> None:
    """Of records, of selection state and of tables."""
    family = ask_named(name, config, dtype=dtype).family
    assert per_token(family) == sizes
    records, selection_state, tables = sizes
    assert per_token(family, heated=True) == (records, selection_state, 3 * tables)


def test_a_resident_request_has_records_of_its_positions_and_state_of_its_pages() -> None:
    family = ask_named().family
    assert resident_bytes(family, 100) == 100 * 78 * 1152 + 128 * 78 * 256
