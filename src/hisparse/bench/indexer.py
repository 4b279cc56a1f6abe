"""The lightning indexer's scores and top-k against the time that reading its keys once would take."""

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hisparse.bench.provenance import provenance
from hisparse.bench.resolve_setup import check_gpu
from hisparse.bench.timing import call_us
from hisparse.kernels.index_scores import index_scores
from hisparse.kernels.top_k import top_k
from hisparse.layout import PAGE_RECORDS, num_pages_for
from hisparse.selectors import DSA

LAYERS = 2  # with keys of their own, so that they come from memory
HEAD_DIM = 128
MEMORY_GB_PER_S = {"H200": 4800.0, "H100": 3350.0, "A100": 2039.0, "B200": 8000.0}  # data sheets, SXM modules


def bench(
    batches: Sequence[int],
    contexts: Sequence[int],
    heads: Sequence[int],
    k: int,
    commit: str | None,
    gb_per_s: float | None = None,
) -> Iterator[dict[str, Any]]:
    """One result for each combination, and for keys in bf16 and FP8; `gb_per_s` is what the GPU's memory can do.

    Raises:
        BuildError: no GPU, or no NVRTC.
        ValueError: sizes below 1, or a GPU whose memory is not known and not given.
    """
    for name, sizes in (("batch", batches), ("context", contexts), ("heads", heads), ("k", (k,))):
        if min(sizes) < 1:
            raise ValueError(f"{name} must be at least 1, got {min(sizes)}")
    check_gpu()
    rate = memory_rate(torch.cuda.get_device_name()) if gb_per_s is None else gb_per_s
    for num_heads in heads:
        for fp8 in (False, True):
            for batch in batches:
                for context in contexts:
                    measured = _measure(batch, context, num_heads, k, rate, fp8=fp8)
                    yield {**provenance(commit), "memory_gb_per_s": round(rate), **measured}


def memory_rate(device: str) -> float:
    """GB/s of a GPU's memory as its maker gives them. Raises `ValueError` for one that is not known here."""
    for name, rate in MEMORY_GB_PER_S.items():
        if name in device:
            return rate
    raise ValueError(f"the memory rate of {device} is not known here: give --gb-per-s from its data sheet")


def _measure(batch: int, context: int, num_heads: int, k: int, rate: float, *, fp8: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    selector = DSA(top_k=k, head_dim=HEAD_DIM, fp8=fp8)
    pages = num_pages_for(context)
    position = torch.arange(batch * pages * PAGE_RECORDS, device="cuda")
    state = torch.empty(LAYERS, batch * pages, *selector.page_shape, dtype=selector.dtype, device="cuda")
    for layer in state:
        keys = torch.randn(len(position), HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        selector.append(layer, position // PAGE_RECORDS, position, keys)
    table = torch.randperm(batch * pages, device="cuda").int().view(batch, pages)
    lengths = torch.full((batch,), context, device="cuda")
    query = torch.randn(batch, num_heads, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    weights = torch.randn(batch, num_heads, device="cuda")

    def score(number: int) -> torch.Tensor:
        return index_scores(state[number % LAYERS], table, lengths, query, weights, fp8=fp8)

    scores = score(0)
    top_k(scores, lengths, k)
    torch.topk(scores, min(k, context))
    both = call_us(lambda number: top_k(score(number), lengths, k))
    read = batch * context * selector.state_bytes_per_token
    floor = read / rate / 1e3
    return {
        "batch": batch,
        "context": context,
        "index_heads": num_heads,
        "keys": "fp8" if fp8 else "bf16",
        "k": k,
        "us_scores": round(call_us(score), 1),
        "us_top_k": round(call_us(lambda _: top_k(scores, lengths, k)), 1),
        "us": round(both, 1),
        **_flashinfer(scores, k),
        "us_torch_topk": round(call_us(lambda _: torch.topk(scores, min(k, context))), 1),
        "us_floor": round(floor, 1),
        "ratio_to_floor": round(both / floor, 2),
    }


def _flashinfer(scores: torch.Tensor, k: int) -> dict[str, float]:
    """What its top-k takes of the same scores, unsorted and without a tie rule, where it is installed."""
    try:
        module = importlib.import_module("flashinfer")
        module.top_k(scores, k)
    except (ImportError, AttributeError, RuntimeError, ValueError):
        return {}
    return {"us_flashinfer_top_k": round(call_us(lambda _: module.top_k(scores, k)), 1)}


def line(result: dict[str, Any]) -> str:
    """One result to read."""
    return (
        f"batch {result['batch']}, context {result['context']}, {result['index_heads']} heads, {result['keys']} keys: "
        f"scores {result['us_scores']:.1f} us, top-k {result['us_top_k']:.1f} us (torch.topk "
        f"{result['us_torch_topk']:.1f}), both {result['us']:.1f} us, "
        f"{result['ratio_to_floor']:.2f} of reading the keys"
    )
