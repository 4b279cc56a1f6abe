"""Triton's attention over slots against the torch reference on a CPU."""

import math

import pytest
import torch
from torch import Tensor

from hisparse.attention import GroupedRecords, LatentRecords, attend, attend_latent, attend_latent_part
from hisparse.attention.triton_choice import can_use_triton

pytestmark = pytest.mark.gpu

GROUPED = [(4, 4, 16), (32, 8, 128), (9, 3, 64), (64, 1, 128), (40, 2, 128)]  # query heads, KV heads, head_dim
LATENT = [(8, 32, 16), (20, 128, 32), (64, 512, 64)]  # heads, latent and rope elements
SIZES = [(1, 1), (3, 100), (16, 2048), (70, 64)]  # batch, k
POOL = 3000
# Weights and results are rounded to half precision, 2 ** -9 and 2 ** -12 relative each.
ERROR = 2**-6


def slots_of(batch: int, k: int) -> Tensor:
    slots = torch.stack([torch.randperm(POOL)[:k] for _ in range(batch)]).int()
    slots[torch.rand(slots.shape) < 0.2] = -1
    slots[0, k // 2 :] = -1
    if batch > 1:
        slots[1] = -1
    return slots


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("batch", "k"), SIZES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), GROUPED)
def test_grouped(heads: int, kv_heads: int, dim: int, batch: int, k: int, dtype: torch.dtype) -> None:
    torch.manual_seed(heads)
    layout = GroupedRecords(kv_heads, dim, dtype)
    pool = layout.pack(torch.randn(POOL, kv_heads, dim), torch.randn(POOL, kv_heads, dim))
    query, slots = torch.randn(batch, heads, dim).to(dtype), slots_of(batch, k)
    unused = torch.ones(POOL, dtype=torch.bool)
    unused[slots[slots >= 0].long()] = False
    pool[unused] = 0xFF  # NaN
    assert can_use_triton(query.cuda(), dtype, dim)
    got = attend(query.cuda(), pool.cuda(), slots.cuda(), layout)
    assert got.dtype == dtype
    torch.testing.assert_close(got.cpu().float(), attend(query.float(), pool, slots, layout), rtol=ERROR, atol=ERROR)


@pytest.mark.parametrize(("batch", "k"), SIZES)
@pytest.mark.parametrize(("heads", "latent", "rope"), LATENT)
def test_latent(heads: int, latent: int, rope: int, batch: int, k: int) -> None:
    from hisparse.attention import triton_kernels

    torch.manual_seed(heads)
    layout = LatentRecords(latent, rope, torch.bfloat16)
    pool, scale = layout.pack(torch.randn(POOL, latent + rope)), (latent + rope) ** -0.5
    query, slots = torch.randn(batch, heads, latent + rope).bfloat16(), slots_of(batch, k)
    records = pool.cuda().view(torch.bfloat16)
    out, lse = triton_kernels.attend_latent(query.cuda(), records, slots.cuda(), latent, scale)
    want = attend_latent_part(query.float(), pool, slots, layout, scale)
    torch.testing.assert_close(out.cpu().float(), want.out, rtol=ERROR, atol=ERROR)
    torch.testing.assert_close(lse.cpu(), want.lse, rtol=0, atol=1e-4)
    if latent != 512:  # it is what the model's attention uses then
        assert torch.equal(attend_latent(query.cuda(), pool.cuda(), slots.cuda(), layout, scale).out, out)


def test_where_records_lie_does_not_change_a_bit() -> None:
    layout = GroupedRecords(2, 64, torch.bfloat16)
    pool = layout.pack(torch.randn(POOL, 2, 64), torch.randn(POOL, 2, 64)).cuda()
    query, slots = torch.randn(4, 8, 64).bfloat16().cuda(), slots_of(4, 500).cuda()
    moved = torch.randperm(POOL, device="cuda")
    there = torch.empty_like(pool)
    there[moved] = pool
    elsewhere = torch.where(slots < 0, slots, moved[slots.long()].int())
    assert torch.equal(attend(query, pool, slots, layout), attend(query, there, elsewhere, layout))
    strided = slots.repeat(1, 2)[:, :500]
    assert torch.equal(attend(query, pool, strided, layout), attend(query, pool, slots, layout))


def test_nothing_selected() -> None:
    layout = LatentRecords(64, 16, torch.bfloat16)
    pool, query = torch.zeros(4, layout.record_bytes, dtype=torch.uint8).cuda(), torch.randn(2, 4, 80).bfloat16().cuda()
    for k in (0, 3):
        out, lse = attend_latent(query, pool, torch.full((2, k), -1, dtype=torch.int32).cuda(), layout, 1.0)
        assert not out.any()
        assert (lse == -math.inf).all()
