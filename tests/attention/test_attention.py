"""Sparse and tiled attention against scaled dot-product attention in float64."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hisparse.attention import GroupedRecords, attend, attend_tiled

CASES = [(4, 4, 16), (6, 3, 8), (8, 1, 32)]  # query heads, KV heads, head_dim


def random_keys(n: int, layout: GroupedRecords, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    shape = (n, layout.num_kv_heads, layout.head_dim)
    return (
        torch.randn(shape, generator=random).to(layout.dtype),
        torch.randn(shape, generator=random).to(layout.dtype),
    )


def dense(query: Tensor, key: Tensor, value: Tensor, causal: bool = False) -> Tensor:
    """[n, heads, d] queries over [m, kv, d]; with `causal` the queries are the last n positions."""
    q, k, v = (x.double().transpose(0, 1)[None] for x in (query, key, value))
    n, m = query.shape[0], key.shape[0]
    mask = torch.ones(n, m, dtype=torch.bool).tril_(m - n) if causal else None
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attend_reads_its_slots_and_nothing_else(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    layout = GroupedRecords(kv_heads, dim, dtype)
    key, value = random_keys(40, layout)
    pool = layout.pack(key, value)
    pool[0] = 0xFF  # slot 0 is what a pad must not read: NaN in every dtype
    query = torch.randn(3, heads, dim, generator=torch.Generator().manual_seed(1))
    slots = torch.tensor([[5, 9, 39, -1], [7, -1, -1, -1], [1, 2, 3, 4]], dtype=torch.int32)
    out = attend(query, pool, slots, layout)
    for i, row in enumerate(slots.tolist()):
        used = [slot for slot in row if slot >= 0]
        want = dense(query[i : i + 1], key[used], value[used])[0]
        torch.testing.assert_close(out[i].double(), want, rtol=1e-5, atol=1e-5)  # float32 against float64


def test_request_without_slots_gets_zeros() -> None:
    layout = GroupedRecords(1, 8, torch.float32)
    pool = torch.full((2, layout.record_bytes), 0xFF, dtype=torch.uint8)
    out = attend(torch.randn(2, 4, 8), pool, torch.full((2, 3), -1, dtype=torch.int32), layout)
    assert torch.equal(out, torch.zeros(2, 4, 8))


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), CASES)
@pytest.mark.parametrize(("start", "n", "tile"), [(0, 7, 4), (5, 1, 4), (40, 9, 16), (64, 33, 64)])
def test_tiles_merge_to_dense_attention(heads: int, kv_heads: int, dim: int, start: int, n: int, tile: int) -> None:
    layout = GroupedRecords(kv_heads, dim, torch.float32)
    key, value = random_keys(start + n, layout)
    records = layout.pack(key, value)
    query = torch.randn(n, heads, dim, generator=torch.Generator().manual_seed(2))
    tiles = records[:start].split(tile) if start else ()
    out = attend_tiled(query, tiles, records[start:], layout)
    want = dense(query, key, value, causal=True)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)  # float32 against float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_records_round_trip(dtype: torch.dtype) -> None:
    layout = GroupedRecords(2, 8, dtype)
    key, value = random_keys(5, layout)
    records = layout.pack(key, value)
    assert list(records.shape) == [5, layout.record_bytes]
    for got, want in zip(layout.unpack(records), (key, value), strict=True):
        assert torch.equal(got, want)
