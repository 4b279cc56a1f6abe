"""Puts an engine together: the cache's sizes from the configuration, the model's shape and the prompts."""

from collections.abc import Sequence

from hisparse.attention import GroupedRecords
from hisparse.cache import HierarchicalCache
from hisparse.checkpoint import Loaded
from hisparse.config import HiSparseConfig
from hisparse.engine.engine import Engine, Observer
from hisparse.engine.runner import Runner
from hisparse.engine.scheduler import Scheduler
from hisparse.host_memory import Progress
from hisparse.layout import CacheLayout, num_pages_for
from hisparse.models.llama import Llama
from hisparse.selection_state import SelectionState
from hisparse.selectors import AllPositions, Quest, Selector


def build_selector(config: HiSparseConfig, model: Llama) -> Selector:
    """The configured selector for this model."""
    if config.selector == "all":
        return AllPositions(config.top_k)
    return Quest(
        top_k=config.top_k,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
        dtype=model.dtype,
        aggregation=config.quest_aggregation,
        per_kv_head=config.quest_per_kv_head,
    )


def build_records(model: Llama, num_groups: int = 1) -> GroupedRecords:
    """The record of one selection group of this model."""
    return GroupedRecords(model.config.num_kv_heads // num_groups, model.config.head_dim, model.dtype)


def build_engine(
    loaded: Loaded,
    config: HiSparseConfig,
    request_sizes: Sequence[int],
    *,
    observers: Sequence[Observer] = (),
    debug: bool = False,
    progress: Progress | None = None,
) -> Engine:
    """An engine over a new cache.

    Args:
        loaded: the checkpoint.
        config: of the cache and its selector.
        request_sizes: positions (prompt and output) of the requests to come. The host pool gets room for
            the largest ones that can run together, unless the configuration sets its size.
        observers: see every forward.
        debug: check every selection.
        progress: of pinning the host pool, on a GPU: called with (bytes done, bytes in all).
    """
    model = loaded.model
    selector = build_selector(config, model)
    records = build_records(model, selector.num_groups)
    num_running = max(min(config.max_running_requests, len(request_sizes)), 1)
    layout = CacheLayout(
        num_layers=model.config.num_layers * selector.num_groups,
        record_bytes=records.record_bytes,
        top_k=config.top_k,
        device_buffer_size=config.device_buffer_size,
        max_requests=num_running,
        num_pages=_num_host_pages(config, request_sizes, num_running),
    )
    state = SelectionState(
        num_layers=model.config.num_layers,
        num_pages=layout.num_pages,
        page_shape=selector.page_shape,
        dtype=selector.dtype,
        max_requests=layout.max_requests,
        max_pages=layout.max_pages,
        device=model.device,
    )
    cache = HierarchicalCache(
        layout,
        policy=config.policy,
        device=model.device,
        selection_state=state,
        debug=debug,
        progress=progress,
    )
    runner = Runner(model, selector, cache, records)
    return Engine(
        runner,
        Scheduler(runner, config.prefill_chunk),
        loaded.tokenizer,
        stop_token_ids=loaded.stop_token_ids,
        max_context=model.config.max_positions,
        observers=observers,
    )


def _num_host_pages(config: HiSparseConfig, request_sizes: Sequence[int], num_running: int) -> int:
    if config.host_to_device_ratio is not None:
        slots = config.max_running_requests * config.device_buffer_size
        return max(num_pages_for(int(config.host_to_device_ratio * slots)), 1)
    largest = sorted(request_sizes, reverse=True)[:num_running]
    return max(sum(num_pages_for(size) for size in largest), 1)
