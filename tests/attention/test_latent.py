"""Latent attention, sparse and tiled, against a softmax in float64."""

import pytest
import torch
from torch import Tensor

from hisparse.attention import LatentRecords, attend_latent, attend_latent_part, attend_latent_tiled, merge

SCALE = 0.17
LAYOUTS = {
    "float32": LatentRecords(32, 8, torch.float32),
    "bfloat16": LatentRecords(20, 6, torch.bfloat16),  # a padded record
    "fp8": LatentRecords(132, 8, torch.bfloat16, fp8=True),  # two scales, the second of a short group, and a pad
}
each_layout = pytest.mark.parametrize("name", LAYOUTS)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    torch.manual_seed(0)


def make_records(layout: LatentRecords, n: int) -> tuple[Tensor, Tensor]:
    """Records, and as float64 the keys that they hold: what FP8 loses is tested elsewhere."""
    key = torch.randn(n, layout.width, generator=torch.Generator().manual_seed(0))
    records = layout.pack(key)
    return records, layout.unpack(records).double()


def make_query(layout: LatentRecords, n: int, heads: int = 5) -> Tensor:
    return torch.randn(n, heads, layout.width, generator=torch.Generator().manual_seed(1))


def softmax_attention(query: Tensor, key: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """One query [heads, width] over keys [m, width], in float64: out [heads, rank], lse [heads]."""
    scores = query.double() @ key.T * SCALE
    return scores.softmax(dim=-1) @ key[:, :rank], scores.logsumexp(dim=-1)


def assert_near(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)  # float32 against float64


@each_layout
def test_reads_its_slots_and_nothing_else(name: str) -> None:
    layout = LAYOUTS[name]
    records, key = make_records(layout, 40)
    records[0] = 0xFF  # slot 0 is what a pad must not read: NaN in every dtype
    query = make_query(layout, 3)
    slots = torch.tensor([[5, 9, 39, -1], [7, -1, -1, -1], [1, 2, 3, 4]], dtype=torch.int32)
    got = attend_latent(query, records, slots, layout, SCALE)
    assert list(got.out.shape) == [3, 5, layout.kv_lora_rank]
    assert got.lse.dtype == torch.float32
    for i, row in enumerate(slots.tolist()):
        out, lse = softmax_attention(query[i], key[[slot for slot in row if slot >= 0]], layout.kv_lora_rank)
        assert_near(got.out[i], out)
        assert_near(got.lse[i], lse)


@each_layout
def test_where_records_lie_does_not_change_a_bit(name: str) -> None:
    layout = LAYOUTS[name]
    records, _ = make_records(layout, 64)
    query, order = make_query(layout, 2), torch.randperm(64)
    scattered = torch.full((64, layout.record_bytes), 0xFF, dtype=torch.uint8)
    scattered[order] = records
    slots = torch.arange(64, dtype=torch.int32).view(2, 32)
    want = attend_latent(query, records, slots, layout, SCALE)
    got = attend_latent(query, scattered, order[slots.long()].int(), layout, SCALE)
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)


def test_output_has_the_dtype_of_the_query_and_takes_views() -> None:
    layout = LAYOUTS["bfloat16"]
    records, _ = make_records(layout, 8)
    query, slots = make_query(layout, 2).bfloat16(), torch.arange(8, dtype=torch.int32).view(2, 4)
    want = attend_latent(query, records, slots, layout, SCALE)
    assert want.out.dtype == torch.bfloat16
    got = attend_latent(query.transpose(0, 1).contiguous().transpose(0, 1), records, slots.long(), layout, SCALE)
    assert torch.equal(got.out, want.out)


@each_layout
def test_parts_merge_to_the_whole(name: str) -> None:
    """Hits and misses, one request with hits alone, one with misses alone, one with neither."""
    layout = LAYOUTS[name]
    records, _ = make_records(layout, 50)
    query = make_query(layout, 4)
    slots = torch.randperm(50)[:48].view(4, 12).int()
    slots[3] = -1
    is_hit = torch.rand(4, 12) < 0.5
    is_hit[1], is_hit[2] = True, False
    hits, misses = slots.masked_fill(~is_hit, -1), slots.masked_fill(is_hit, -1)
    parts = [attend_latent_part(query, records, part, layout, SCALE) for part in (hits, misses)]
    merged, whole = merge(*parts), attend_latent(query, records, slots, layout, SCALE)
    assert_near(merged.out, whole.out.double())
    assert_near(merged.lse[:3], whole.lse[:3].double())
    assert torch.equal(merged.out[3], torch.zeros(5, layout.kv_lora_rank))
    assert (merged.lse[3] == -torch.inf).all()


@each_layout
@pytest.mark.parametrize(("start", "n", "tile"), [(0, 7, 4), (5, 1, 4), (40, 9, 16), (64, 33, 64)])
def test_tiles_merge_to_dense_attention(name: str, start: int, n: int, tile: int) -> None:
    layout = LAYOUTS[name]
    records, key = make_records(layout, start + n)
    query = make_query(layout, n)
    got = attend_latent_tiled(query, tiles_of(records, start, tile), records[start:], layout, SCALE)
    assert list(got.shape) == [n, 5, layout.kv_lora_rank]
    for i in range(n):
        assert_near(got[i], softmax_attention(query[i], key[: start + i + 1], layout.kv_lora_rank)[0])


@each_layout
@pytest.mark.parametrize(("start", "n", "tile"), [(0, 7, 4), (40, 9, 16), (70, 30, 32)])
@pytest.mark.parametrize("top_k", [1, 5])
def test_tiles_read_the_selected_positions_alone(name: str, start: int, n: int, tile: int, top_k: int) -> None:
    """Few enough that whole tiles, and the chunk itself, have nothing selected for many queries."""
    layout = LAYOUTS[name]
    records, key = make_records(layout, start + n)
    query = make_query(layout, n)
    chosen = [torch.randperm(start + i + 1)[:top_k].sort().values for i in range(n)]
    selected = torch.zeros(n, start + n, dtype=torch.bool)
    for row, positions in zip(selected, chosen, strict=True):
        row[positions] = True
    got = attend_latent_tiled(query, tiles_of(records, start, tile), records[start:], layout, SCALE, selected)
    assert got.isfinite().all()
    for i, positions in enumerate(chosen):
        assert_near(got[i], softmax_attention(query[i], key[positions], layout.kv_lora_rank)[0])
    slots = torch.stack([torch.nn.functional.pad(p, (0, top_k - len(p)), value=-1) for p in chosen])
    assert_near(got, attend_latent(query, records, slots, layout, SCALE).out.double())  # as decoding reads them


def test_selection_of_everything_is_dense_attention_bit_for_bit() -> None:
    layout = LAYOUTS["float32"]
    records, _ = make_records(layout, 50)
    query, tiles = make_query(layout, 10), tiles_of(records, 40, 16)
    everything = torch.ones(10, 50, dtype=torch.bool)
    dense = attend_latent_tiled(query, tiles, records[40:], layout, SCALE)
    assert torch.equal(attend_latent_tiled(query, tiles, records[40:], layout, SCALE, everything), dense)


def test_query_that_reads_nothing_gets_zeros() -> None:
    layout = LAYOUTS["float32"]
    records, _ = make_records(layout, 30)
    selected = torch.zeros(10, 30, dtype=torch.bool)
    selected[1:, 3] = True
    got = attend_latent_tiled(make_query(layout, 10), tiles_of(records, 20, 8), records[20:], layout, SCALE, selected)
    assert torch.equal(got[0], torch.zeros(5, layout.kv_lora_rank))
    assert_near(got[1:], layout.unpack(records)[3, : layout.kv_lora_rank].double().expand(9, 5, -1))


def tiles_of(records: Tensor, start: int, tile: int) -> tuple[Tensor, ...]:
    return records[:start].split(tile) if start else ()
