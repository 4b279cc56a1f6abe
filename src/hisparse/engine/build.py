"""Puts an engine together: the cache's sizes from the configuration, the model's shape and the prompts."""

from collections.abc import Sequence

from hisparse.attention import GroupedRecords, LatentRecords
from hisparse.cache import HierarchicalCache
from hisparse.checkpoint import Loaded
from hisparse.config import HiSparseConfig
from hisparse.engine.engine import Engine, Observer
from hisparse.engine.family import Family
from hisparse.engine.grouped import GroupedFamily
from hisparse.engine.latent import LatentFamily
from hisparse.engine.residency import CacheResidency
from hisparse.engine.runner import Runner, buckets_up_to
from hisparse.engine.scheduler import Scheduler
from hisparse.engine.sizes import layout_for, state_for
from hisparse.host_memory import Progress
from hisparse.kernels.side_stream import SideStream
from hisparse.layout import PAGE_RECORDS, num_pages_for
from hisparse.models import Llama, Model, SparseMla
from hisparse.selectors import DSA, AllPositions, AttentionMass, Quest, Selector


def build_family(config: HiSparseConfig, model: Model) -> Family:
    """How this model attends, as configured.

    Raises:
        ValueError: a selector or a record format that is not for this kind of model.
    """
    if isinstance(model, SparseMla):
        return _latent_family(config, model)
    for key, value in (("selector", config.selector), *_cache_dtypes(config)):
        if value in ("dsa", "fp8"):
            raise ValueError(f"{key} {value!r} is for models with latent attention, and this is a {_name(model)}")
    return grouped_family(model, _grouped_selector(config, model))


def dense_family(config: HiSparseConfig, model: Model, context: int) -> Family:
    """The same model and records, reading every position of histories up to `context`."""
    if isinstance(model, SparseMla):
        return _latent_family(config, model, top_k=context)
    return grouped_family(model, AllPositions(context))


def grouped_family(model: Llama, selector: Selector) -> GroupedFamily:
    """Grouped-query attention with this selector, whose groups say what a record holds."""
    num_kv_heads = model.config.num_kv_heads // selector.num_groups
    return GroupedFamily(model, selector, GroupedRecords(num_kv_heads, model.config.head_dim, model.dtype))


def _grouped_selector(config: HiSparseConfig, model: Llama) -> Selector:
    if config.selector == "all":
        return AllPositions(config.top_k_for(None))
    if config.selector == "attention_mass":
        return AttentionMass(
            top_k=config.top_k_for(None),
            num_kv_heads=model.config.num_kv_heads,
            head_dim=model.config.head_dim,
            dtype=model.dtype,
        )
    return Quest(
        top_k=config.top_k_for(None),
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
        dtype=model.dtype,
        aggregation=config.quest_aggregation,
        per_kv_head=config.quest_per_kv_head,
    )


def _latent_family(config: HiSparseConfig, model: SparseMla, top_k: int | None = None) -> LatentFamily:
    """The model's own indexer selects, and never more than the model was trained to read."""
    if config.selector not in ("auto", "dsa"):
        raise ValueError(
            f"selector must be 'auto' or 'dsa' for a {_name(model)}, which has an indexer of its own, "
            f"got {config.selector!r}"
        )
    shape = model.config
    selector = DSA(
        top_k=top_k or config.top_k_for(shape.index_top_k),
        head_dim=shape.index_head_dim,
        dtype=model.dtype,
        fp8=config.index_cache_dtype == "fp8",
    )
    fp8 = config.kv_cache_dtype == "fp8"
    records = LatentRecords(shape.kv_lora_rank, shape.qk_rope_head_dim, model.dtype, fp8=fp8)
    return LatentFamily(model, selector, records, SideStream(model.device) if model.device.type == "cuda" else None)


def _cache_dtypes(config: HiSparseConfig) -> tuple[tuple[str, str], ...]:
    return ("kv_cache_dtype", config.kv_cache_dtype), ("index_cache_dtype", config.index_cache_dtype)


def _name(model: Model) -> str:
    return model.config.architecture


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
            the largest ones that can run together, unless the configuration sets its size; longer ones than the
            longest of these are refused.
        observers: see every forward.
        debug: check every selection.
        progress: of pinning the host pool, on a GPU: called with (bytes done, bytes in all).

    Raises:
        ValueError: a configuration that does not fit the model or these requests.
        HiSparseError: memory that the system does not give.
    """
    family = build_family(config, loaded.model)
    num_running = max(min(config.max_running_requests, len(request_sizes)), 1)
    num_pages = _num_host_pages(config, family.top_k, request_sizes, num_running)
    longest = _longest(request_sizes, num_pages)
    if config.selector == "all" and family.top_k < longest:
        raise ValueError(
            f"the selector 'all' reads every position, and requests may have {longest} with top_k {family.top_k}: "
            f"raise top_k (and device_buffer_size), or use the selector 'quest'"
        )
    layout = layout_for(
        family,
        device_buffer_size=config.buffer_for(family.top_k),
        max_requests=num_running,
        num_pages=num_pages,
        max_positions=longest,
    )
    cache = HierarchicalCache(
        layout,
        policy=config.policy,
        device=loaded.model.device,
        selection_state=state_for(family, layout, loaded.model.device),
        debug=debug,
        prefetch=config.prefetch,
        progress=progress,
    )
    records = config.cuda_graph and family.can_be_recorded
    runner = Runner(family, cache, records=records, seeds=config.seeds_for(family.top_k))
    buckets = buckets_up_to(num_running) if records else ()
    return Engine(
        runner,
        Scheduler(CacheResidency(runner), config.prefill_chunk, config.step_tokens, buckets),
        loaded.tokenizer,
        stop_token_ids=loaded.stop_token_ids,
        max_context=loaded.model.config.max_positions,
        observers=observers,
    )


def _num_host_pages(config: HiSparseConfig, top_k: int, request_sizes: Sequence[int], num_running: int) -> int:
    if config.host_to_device_ratio is not None:
        slots = config.max_running_requests * config.buffer_for(top_k)
        return max(num_pages_for(int(config.host_to_device_ratio * slots)), 1)
    largest = sorted(request_sizes, reverse=True)[:num_running]
    return max(sum(num_pages_for(size) for size in largest), 1)


def _longest(request_sizes: Sequence[int], num_pages: int) -> int:
    """Positions of the longest request, which page tables are made for; with no sizes, all of the host pool's."""
    num_rows = num_pages * PAGE_RECORDS
    return min(max(request_sizes, default=num_rows), num_rows)
