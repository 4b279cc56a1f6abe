"""Sparse decode attention in triton: for grouped-query records, and for latent records where attend_latent.cu is not.

A program takes a few heads of one request and a share of its slots; `merge` puts the shares together by their
log-sum-exp. Any GPU that triton knows, any head size that is a power of two. `sparse.py` and `latent_sparse.py` specify
what is computed. How a result is rounded depends on the shapes alone, and on the order of a request's slots.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64  # slots at a time
LEAST_ROWS = 16  # query heads of a program: what the matrix unit takes
PROGRAMS_A_MULTIPROCESSOR = 4


@triton.jit
def _add(scores, values, largest, total, acc):
    """Take a block's scores and values into a running softmax, base 2."""
    now = tl.maximum(largest, tl.max(scores, 1))
    base = tl.where(now == -float("inf"), 0.0, now)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(largest - base)
    acc = acc * shrink[:, None] + tl.dot(weights.to(values.dtype), values)
    return now, total * shrink + tl.sum(weights, 1), acc


@triton.jit
def _store(out, lse, line, mask, acc, largest, total, WIDTH: tl.constexpr):
    column = tl.arange(0, WIDTH)
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + line[:, None] * WIDTH + column[None, :], result, mask=mask[:, None])
    tl.store(lse + line, tl.where(total > 0, largest + tl.log2(total), -float("inf")), mask=mask)


@triton.jit
def _attend_grouped(
    query,  # [b, kv_heads * GROUP, DIM]
    records,  # [N, 2, kv_heads, DIM]
    slots,  # int32 [b, k]
    out,  # float32 [b, shares, kv_heads * GROUP, DIM]
    lse,  # float32 [b, shares, kv_heads * GROUP], base 2
    scale,
    kv_heads,
    k,
    share,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, column = tl.arange(0, ROWS), tl.arange(0, DIM)
    is_head = row < GROUP
    own = request * kv_heads * GROUP + head * GROUP + row
    q = tl.load(query + own[:, None] * DIM + column[None, :], mask=is_head[:, None], other=0.0)
    largest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    for first in range(part * share, tl.minimum(part * share + share, k), BLOCK):
        at = first + tl.arange(0, BLOCK)
        slot = tl.load(slots + request * k + at, mask=at < k, other=-1)
        live = slot >= 0
        record = tl.where(live, slot, 0).to(tl.int64) * (2 * kv_heads * DIM)
        key = records + (record + head * DIM)[:, None] + column[None, :]
        keys = tl.load(key, mask=live[:, None], other=0.0)
        values = tl.load(key + kv_heads * DIM, mask=live[:, None], other=0.0)
        scores = tl.where(live[None, :], tl.dot(q, tl.trans(keys)) * scale, -float("inf"))
        largest, total, acc = _add(scores, values, largest, total, acc)
    line = (request * tl.num_programs(2) + part) * kv_heads * GROUP + head * GROUP + row
    _store(out, lse, line, is_head, acc, largest, total, DIM)


@triton.jit
def _attend_latent(
    query,  # [b, heads, LATENT + ROPE]
    records,  # [N, LATENT + ROPE]
    slots,  # int32 [b, k]
    out,  # float32 [b, shares, heads, LATENT]
    lse,  # float32 [b, shares, heads], base 2
    scale,
    heads,
    k,
    share,
    ROWS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request, group, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    WIDTH: tl.constexpr = LATENT + ROPE
    row, column, rotated = group * ROWS + tl.arange(0, ROWS), tl.arange(0, LATENT), LATENT + tl.arange(0, ROPE)
    is_head = row < heads
    own = query + (request * heads + row)[:, None] * WIDTH
    q_latent = tl.load(own + column[None, :], mask=is_head[:, None], other=0.0)
    q_rope = tl.load(own + rotated[None, :], mask=is_head[:, None], other=0.0)
    largest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, LATENT], tl.float32)
    for first in range(part * share, tl.minimum(part * share + share, k), BLOCK):
        at = first + tl.arange(0, BLOCK)
        slot = tl.load(slots + request * k + at, mask=at < k, other=-1)
        live = slot >= 0
        record = records + tl.where(live, slot, 0).to(tl.int64)[:, None] * WIDTH
        latent = tl.load(record + column[None, :], mask=live[:, None], other=0.0)
        rope = tl.load(record + rotated[None, :], mask=live[:, None], other=0.0)
        scores = (tl.dot(q_latent, tl.trans(latent)) + tl.dot(q_rope, tl.trans(rope))) * scale
        largest, total, acc = _add(tl.where(live[None, :], scores, -float("inf")), latent, largest, total, acc)
    line = (request * tl.num_programs(2) + part) * heads + row
    _store(out, lse, line, is_head, acc, largest, total, LATENT)


@triton.jit
def _merge(shares, share_lse, out, lse, num_shares, heads, WIDTH: tl.constexpr, SHARES: tl.constexpr):
    """Of one head of one request; `lse` natural."""
    request, head = tl.program_id(0), tl.program_id(1)
    part, column = tl.arange(0, SHARES), tl.arange(0, WIDTH)
    each = tl.load(
        share_lse + (request * num_shares + part) * heads + head, mask=part < num_shares, other=-float("inf")
    )
    largest = tl.max(each, 0)
    base = tl.where(largest == -float("inf"), 0.0, largest)
    total = tl.sum(tl.exp2(each - base), 0)
    acc = tl.zeros([WIDTH], tl.float32)
    for i in range(num_shares):
        line = (request * num_shares + i) * heads + head
        weight = tl.exp2(tl.load(share_lse + line) - base)
        acc += weight * tl.load(shares + line * WIDTH + column)
    result = acc / tl.where(total > 0, total, 1.0)
    line = request * heads + head
    tl.store(out + line * WIDTH + column, result.to(out.dtype.element_ty))
    natural = tl.where(total > 0, (base + tl.log2(total)) * 0.6931471805599453, -float("inf"))
    tl.store(lse + line, natural)


def attend_grouped(query: Tensor, records: Tensor, slots: Tensor, num_kv_heads: int, scale: float) -> Tensor:
    """Attention over grouped-query records.

    Args:
        query: [b, num_heads, head_dim], contiguous.
        records: [N, 2, num_kv_heads, head_dim] of the query's dtype, contiguous.
        slots: int32 [b, k], contiguous, -1 pads.
        num_kv_heads: of the records.
        scale: what scores are multiplied by.

    Returns:
        [b, num_heads, head_dim], zeros for a request without slots.
    """
    batch, heads, dim = query.shape
    group, k = heads // num_kv_heads, slots.shape[1]
    rows = max(LEAST_ROWS, triton.next_power_of_2(group))
    share, num_shares = _shares(batch * num_kv_heads, k, query.device)
    shares, share_lse = _workspace(batch, num_shares, heads, dim, query.device)
    _attend_grouped[(batch, num_kv_heads, num_shares)](
        query, records, slots, shares, share_lse, scale * math.log2(math.e), num_kv_heads, k, share,
        GROUP=group, ROWS=rows, DIM=dim, BLOCK=BLOCK, num_warps=4, num_stages=2,
    )  # fmt: skip
    return _merged(shares, share_lse, query)[0]


def attend_latent(query: Tensor, records: Tensor, slots: Tensor, latent: int, scale: float) -> tuple[Tensor, Tensor]:
    """Attention over latent records.

    Args:
        query: [b, heads, width], contiguous; its first `latent` elements meet the values.
        records: [N, width] of the query's dtype, contiguous.
        slots: int32 [b, k], contiguous, -1 pads.
        latent: elements of a value; it and the rest of the width are powers of two.
        scale: what scores are multiplied by.

    Returns:
        [b, heads, latent], and float32 [b, heads], log of the sum of exponentials, -inf for a request without slots.
    """
    batch, heads, width = query.shape
    groups, k = -(-heads // LEAST_ROWS), slots.shape[1]
    share, num_shares = _shares(batch * groups, k, query.device)
    shares, share_lse = _workspace(batch, num_shares, heads, latent, query.device)
    _attend_latent[(batch, groups, num_shares)](
        query, records, slots, shares, share_lse, scale * math.log2(math.e), heads, k, share,
        ROWS=LEAST_ROWS, LATENT=latent, ROPE=width - latent, BLOCK=BLOCK, num_warps=4, num_stages=2,
    )  # fmt: skip
    return _merged(shares, share_lse, query)


def _shares(lines: int, k: int, device: torch.device) -> tuple[int, int]:
    """Slots of a share, and how many shares: enough programs for the GPU."""
    programs = torch.cuda.get_device_properties(device).multi_processor_count * PROGRAMS_A_MULTIPROCESSOR
    blocks = max(-(-k // BLOCK), 1)
    share = -(-blocks // max(min(programs // max(lines, 1), blocks), 1)) * BLOCK
    return share, max(-(-k // share), 1)


def _workspace(batch: int, num_shares: int, heads: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    shares = torch.empty(batch, num_shares, heads, width, device=device)
    return shares, torch.empty(batch, num_shares, heads, device=device)


def _merged(shares: Tensor, share_lse: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    batch, num_shares, heads, width = shares.shape
    out = torch.empty(batch, heads, width, dtype=query.dtype, device=query.device)
    lse = torch.empty(batch, heads, device=query.device)
    if out.numel():
        _merge[(batch, heads)](
            shares, share_lse, out, lse, num_shares, heads, WIDTH=width, SHARES=triton.next_power_of_2(num_shares)
        )
    return out, lse
