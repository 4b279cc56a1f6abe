"""Decode attention over latent records at scattered slots: this project's kernels beside whatever else is installed.

Every call reads another pool, as layers do, so that records come from memory. FlashInfer is given the same slots as
pages of one record, with its plan made beforehand; its kernels read latent and rope parts from pools of their own.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hisparse.attention import LatentRecords, attend_latent, attend_latent_part
from hisparse.attention.triton_choice import can_use_triton
from hisparse.bench.provenance import provenance
from hisparse.bench.resolve_setup import check_gpu
from hisparse.bench.timing import call_us

POOLS = 8
SLOTS_EACH = 4096  # of a request
LATENT, ROPE = 512, 64
SCALE = (LATENT + ROPE) ** -0.5
WORKSPACE_BYTES = 256 << 20

Call = Callable[[int], Tensor]


class Problem:
    """Queries, slots and pools of one batch size."""

    def __init__(self, batch: int, heads: int, k: int) -> None:
        torch.manual_seed(batch)
        self.batch, self.heads, self.k = batch, heads, k
        self.layout = LatentRecords(LATENT, ROPE, torch.bfloat16)
        self.keys = torch.randn(batch * SLOTS_EACH, LATENT + ROPE, device="cuda", dtype=torch.bfloat16)
        self.query = torch.randn(batch, heads, LATENT + ROPE, device="cuda", dtype=torch.bfloat16)
        slots = [torch.randperm(len(self.keys), device="cuda")[:k].sort().values for _ in range(batch)]
        self.slots = torch.stack(slots).int()

    def pools(self, layout: LatentRecords) -> list[Tensor]:
        """The same records, several times."""
        packed = layout.pack(self.keys)
        return [packed.clone() for _ in range(POOLS)]

    def error(self, out: Tensor) -> float:
        """The largest difference from float32, whose own error is a thousand times smaller."""
        exact = attend_latent_part(self.query.float(), self.layout.pack(self.keys), self.slots, self.layout, SCALE)
        return float((out.float() - exact.out).abs().max())


def bench(batches: Sequence[int], heads: int, k: int, commit: str | None) -> Iterator[dict[str, Any]]:
    """One result a batch size. Raises `BuildError` without a GPU, `ValueError` for sizes below 1."""
    for name, size in (("heads", heads), ("k", k), *(("batch", batch) for batch in batches)):
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    if k > SLOTS_EACH:
        raise ValueError(f"k must be at most {SLOTS_EACH}, the slots of a request here, got {k}")
    check_gpu()
    for batch in batches:
        problem = Problem(batch, heads, k)
        found = {}
        for name, prepare in CANDIDATES.items():
            call = prepare(problem)
            if call is not None:
                found[name] = {"us": round(call_us(call), 2), "error": round(problem.error(call(0)), 5)}
        best_other = min((one["us"] for name, one in found.items() if not name.startswith("hisparse")), default=None)
        ours = min(one["us"] for name, one in found.items() if name in ("hisparse", "hisparse triton"))
        yield {
            **provenance(commit), "batch": batch, "heads": heads, "k": k, "candidates": found,
            "ratio_to_best_other": None if best_other is None else round(ours / best_other, 3),
        }  # fmt: skip


def _own(problem: Problem, *, fp8: bool) -> Call:
    layout = LatentRecords(LATENT, ROPE, torch.bfloat16, fp8=fp8)
    pools = problem.pools(layout)
    return lambda i: attend_latent(problem.query, pools[i % POOLS], problem.slots, layout, SCALE).out


def _triton(problem: Problem) -> Call | None:
    if not can_use_triton(problem.query, torch.bfloat16, LATENT, ROPE):
        return None
    from hisparse.attention import triton_kernels

    pools = [pool.view(torch.bfloat16) for pool in problem.pools(problem.layout)]
    return lambda i: triton_kernels.attend_latent(problem.query, pools[i % POOLS], problem.slots, LATENT, SCALE)[0]


def _flashinfer(problem: Problem, backend: str) -> Call | None:
    try:
        mla = importlib.import_module("flashinfer.mla")
    except ImportError:
        return None
    query_ends = torch.arange(problem.batch + 1, dtype=torch.int32, device="cuda")
    slot_ends, lengths = query_ends * problem.k, torch.full_like(query_ends[1:], problem.k)
    slots = problem.slots.flatten()
    wrapper = mla.BatchMLAPagedAttentionWrapper(
        torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda"), use_cuda_graph=True, backend=backend,
        qo_indptr=query_ends.clone(), kv_indptr=slot_ends.clone(), kv_indices=slots.clone(), kv_len_arr=lengths.clone(),
    )  # fmt: skip
    try:
        wrapper.plan(
            query_ends, slot_ends, slots, lengths, problem.heads, LATENT, ROPE, 1, False, SCALE,
            torch.bfloat16, torch.bfloat16,
        )  # fmt: skip
        latent, rope = (part.contiguous() for part in problem.query.split((LATENT, ROPE), dim=-1))
        parts = [problem.keys[:, None].split((LATENT, ROPE), dim=-1) for _ in range(POOLS)]
        pools = [(one.clone(memory_format=torch.contiguous_format), two.contiguous()) for one, two in parts]
        wrapper.run(latent, rope, *pools[0])
    except (RuntimeError, ValueError):  # this backend does not run here
        return None

    def call(number: int) -> Tensor:
        out: Tensor = wrapper.run(latent, rope, *pools[number % POOLS])
        return out

    return call


CANDIDATES: dict[str, Callable[[Problem], Call | None]] = {
    "hisparse": lambda problem: _own(problem, fp8=False),
    "hisparse fp8": lambda problem: _own(problem, fp8=True),
    "hisparse triton": _triton,
    "flashinfer fa2": lambda problem: _flashinfer(problem, "fa2"),
    "flashinfer fa3": lambda problem: _flashinfer(problem, "fa3"),
}


def line(result: dict[str, Any]) -> str:
    """One result to read."""
    found = result["candidates"]
    cells = ", ".join(f"{name} {one['us']:.1f} us (error {one['error']:.4f})" for name, one in found.items())
    ratio = result["ratio_to_best_other"]
    return f"batch {result['batch']}: {cells}" + ("" if ratio is None else f"; {ratio:.2f} of the best other")
