"""A plan as one JSON object, and what it rests on, in words."""

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hisparse.plan.footprint import Footprint, per_token, resident_bytes
from hisparse.plan.machine import GB
from hisparse.plan.named_models import NAMED_MODELS
from hisparse.plan.paper import compare_with_paper
from hisparse.plan.plan import Option, Plan, recommended_keys
from hisparse.plan.question import Question

ROWS_PER_US = 40  # measured on one H200, see LOG.md: where the time of a resolve goes


def as_json(plan: Plan) -> dict[str, Any]:
    """All figures by name: bytes, requests, milliseconds and shares; per GPU unless the name says otherwise."""
    question = plan.question
    return {
        "model": question.model.name,
        "architecture": question.model.config.architecture,
        "context": question.context,
        "dtype": dtype_name(question),
        "top_k": question.family.top_k,
        "policy": question.config.policy,
        "machine": _machine(question),
        "records": {"layers": len(question.family.anchors), "bytes": question.family.record_bytes},
        "selection_state_layers": question.family.num_state_layers,
        "index_groups": len(set(question.family.anchors)),
        "bytes_per_token": _per_token(question),
        "weights": {
            "parameters": question.weights.num_parameters,
            "bytes": question.weights.total,
            "bytes_per_gpu": question.machine.weight_bytes_per_gpu(question.weights),
        },
        "cache_bytes_per_gpu": question.cache_bytes,
        "resident": _resident(question),
        "miss_rates_from": question.curve.source,
        "step_budget_ms": question.step_budget_ms,
        "hierarchical": [_option(option) for option in plan.options],
        "recommended": recommended_keys(plan.best) if plan.best else None,
        "recommended_cache": _recommended_cache(plan.best),
        "with_fp8_index_keys": _with_fp8_index_keys(plan),
        "serve": serve_command(plan),
        "against_the_paper": [comparison._asdict() for comparison in compare_with_paper(question)],
        "assumptions": assumptions(question),
    }


def assumptions(question: Question) -> list[str]:
    """What the figures rest on."""
    machine = question.machine
    lines = [
        f"{machine.memory_fraction:.0%} of a GPU's memory is for weights and cache, the rest for all else it needs",
        _about_attention(question),
        f"misses: {question.curve.source}",
        f"link: {machine.link / GB:g} GB/s to each GPU",
    ]
    if (rows_gb_per_s := ROWS_PER_US * question.family.record_bytes / 1e3) < machine.link / GB:
        lines.append(
            f"scattered rows of a large host pool were seen to come at {ROWS_PER_US} a microsecond, "
            f"{rows_gb_per_s:.0f} GB/s of these records: --link {rows_gb_per_s:.0f} plans with that"
        )
    if machine.gpus > 1:
        lines.append(
            "`hisparse serve` runs on one GPU and does not divide weights: the configuration is for each GPU's cache"
        )
    if getattr(question.model.config, "weight_block", None):
        lines.append("FP8 weights are counted as stored; `hisparse serve` turns them into the dtype as it loads them")
    return lines


def about_index_keys(plan: Plan) -> str | None:
    """What FP8 index keys would give, where keys in the dtype are what limits the requests."""
    best, other = plan.best, plan.best_with_fp8_index_keys
    if best is None or other is None:
        return None
    return (
        f"index keys limit the requests to {best.requests_in_budget:,} a GPU: in FP8 (--hisparse-config "
        f'\'{{"index_cache_dtype": "fp8"}}\', selections by rounded keys) there would be {other.requests_in_budget:,}'
    )


def serve_command(plan: Plan) -> str | None:
    """How to serve as recommended; None where `hisparse serve` cannot do it, or has no checkpoint to load."""
    question = plan.question
    is_named = question.model.name in NAMED_MODELS and not Path(question.model.name).exists()
    if plan.best is None or question.machine.gpus > 1 or is_named:
        return None
    arguments = {
        "--max-context": str(question.context),
        "--dtype": dtype_name(question),
        "--device": "cuda",
        "--hisparse-config": json.dumps(recommended_keys(plan.best)),
    }
    words = (question.model.name, *(word for pair in arguments.items() for word in pair))
    return f"hisparse serve {shlex.join(words)}"


def dtype_name(question: Question) -> str:
    """As `--dtype` takes it."""
    return str(question.model.dtype).removeprefix("torch.")


def _about_attention(question: Question) -> str:
    if question.machine.gpus == 1:
        return "one GPU: weights, cache and all requests are on it"
    if question.machine.data_parallel:
        return (
            "dp: each GPU attends for requests of its own; attention weights are on each, experts, MLPs, embedding and "
            "head are divided"
        )
    if question.model.is_latent:
        return "tp: weights are divided; the records of every request are on every GPU, and in a host pool of each"
    return "tp: weights and KV heads are divided; every GPU has its heads' part of every request"


def _machine(question: Question) -> dict[str, Any]:
    machine = asdict(question.machine)
    link, data_parallel = machine.pop("link"), machine.pop("data_parallel")
    return machine | {"attention": "dp" if data_parallel else "tp", "link_gb_per_s": link / GB}


def _per_token(question: Question) -> dict[str, float]:
    sizes = per_token(question.family, heated=question.heated)
    return {name: _whole(value) for name, value in sizes._asdict().items()}


def _resident(question: Question) -> dict[str, int]:
    per_gpu = question.resident_requests_per_gpu
    return {
        "bytes_per_request": resident_bytes(question.family, question.context),
        "requests_per_gpu": per_gpu,
        "requests": per_gpu * question.machine.independent_caches,
    }


def _option(option: Option) -> dict[str, Any]:
    question, fits = option.question, option.capacity
    one = question.footprint(1, option.device_buffer_size)
    return {
        "device_buffer_size": option.device_buffer_size,
        "requests_per_gpu": fits.requests,
        "requests": fits.requests * question.machine.independent_caches,
        "limited_by": fits.limited_by,
        "requests_per_gpu_by_device_memory": fits.by_device,
        "requests_per_gpu_by_host_memory": fits.by_host,
        "slots_bytes_per_request": one.layout.slots_bytes,
        "cache": _cache(option.footprint),
        "miss_rate": option.miss_rate,
        "misses_per_request_and_layer": option.miss_rate * question.family.top_k,
        "fetched_bytes_per_request": option.misses_per_request * question.family.record_bytes,
        "link_ms_per_step": option.link_ms,
        "link_ms_of_anchors": option.link_ms * option.anchor_share,
        "within_budget": option.link_ms <= question.step_budget_ms,
        "requests_per_gpu_within_budget": option.requests_in_budget,
    }


def _recommended_cache(option: Option | None) -> dict[str, int] | None:
    """As `_cache`, of as many requests as the budget allows."""
    if option is None:
        return None
    return _cache(option.question.footprint(option.requests_in_budget, option.device_buffer_size))


def _with_fp8_index_keys(plan: Plan) -> dict[str, int] | None:
    """See `about_index_keys`."""
    other = plan.best_with_fp8_index_keys
    if other is None:
        return None
    return {
        "device_buffer_size": other.device_buffer_size,
        "requests_per_gpu": other.requests_in_budget,
        "requests": other.requests_in_budget * plan.question.machine.independent_caches,
    }


def _cache(size: Footprint | None) -> dict[str, int] | None:
    """What one GPU's cache allocates."""
    return size and {
        "slots_bytes": size.layout.slots_bytes,
        "workspace_bytes": size.layout.workspace_bytes,
        "device_kv_bytes": size.layout.device_kv_bytes,
        "table_bytes": size.layout.table_bytes,
        "heat_bytes": size.heat_bytes,
        "launch_bytes": size.layout.launch_bytes,
        "selection_state_bytes": size.selection_state_bytes,
        "device_bytes": size.device_bytes,
        "host_bytes": size.host_bytes,
    }


def _whole(value: float) -> float:
    """As a whole number where it is one."""
    return int(value) if value.is_integer() else value
