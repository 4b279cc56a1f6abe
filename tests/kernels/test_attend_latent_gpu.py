"""The attention kernel over latent records against its reference in float32."""

import math

import pytest
import torch
from torch import Tensor

from hisparse.attention import LatentRecords, attend_latent, attend_latent_part
from hisparse.kernels import attend_latent as kernels

pytestmark = pytest.mark.gpu

SCALE = 576**-0.5
SLOTS = 4096
SHAPES = [
    (1, 64, 64), (1, 64, 2100), (5, 64, 1100), (3, 64, 2048), (2, 16, 100), (16, 128, 2048), (1, 8, 1), (40, 64, 512),
    (140, 64, 256),
]  # fmt: skip


@pytest.fixture(autouse=True)
def needs_hopper() -> None:
    if torch.cuda.get_device_capability() != kernels.HOPPER:
        pytest.skip("the kernel is Hopper's")


def make(batch: int, heads: int, k: int, layout: LatentRecords) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, records and slots."""
    torch.manual_seed(batch)
    records = layout.pack(torch.randn(SLOTS, 576, device="cuda").bfloat16())
    query = torch.randn(batch, heads, 576, device="cuda").bfloat16()
    slots = torch.stack([torch.randperm(SLOTS, device="cuda")[:k] for _ in range(batch)]).int()
    return query, records, slots


def compare(query: Tensor, records: Tensor, slots: Tensor, layout: LatentRecords) -> None:
    out, lse = attend_latent(query, records, slots, layout, SCALE)
    assert out.dtype == torch.bfloat16  # of the kernel
    want = attend_latent_part(query.float(), records, slots, layout, SCALE)
    # Weights and results are rounded to bf16 (2 ** -9 relative each); FP8 records are widened to bf16 as well, which
    # moves a score of a few units by a few thousandths.
    torch.testing.assert_close(out.float(), want.out, rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(lse, want.lse, rtol=0, atol=5e-3 if layout.fp8 else 1e-5)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("batch", "heads", "k"), SHAPES)
def test_is_the_reference(batch: int, heads: int, k: int, fp8: bool) -> None:
    layout = LatentRecords(512, 64, torch.bfloat16, fp8=fp8)
    query, records, slots = make(batch, heads, k, layout)
    compare(query, records, slots, layout)
    slots[torch.rand(slots.shape, device="cuda") < 0.3] = -1  # pads anywhere, half a selection, none at all
    slots[:, k // 2 :] = -1
    slots[0] = -1
    compare(query, records, slots, layout)
    out, lse = attend_latent(query, records, slots, layout, SCALE)
    assert not out[0].any()
    assert (lse[0] == -math.inf).all()


@pytest.mark.parametrize("fp8", [False, True])
def test_what_is_not_selected_is_never_read(fp8: bool) -> None:
    layout = LatentRecords(512, 64, torch.bfloat16, fp8=fp8)
    query, records, slots = make(4, 64, 300, layout)
    slots[:, 200:] = -1
    before = attend_latent(query, records, slots, layout, SCALE)
    unused = torch.ones(SLOTS, dtype=torch.bool, device="cuda")
    unused[slots[slots >= 0].long()] = False
    records[unused] = 0xFF  # NaN
    after = attend_latent(query, records, slots, layout, SCALE)
    assert torch.equal(before.out, after.out)
    assert torch.equal(before.lse, after.lse)


def test_where_records_lie_does_not_change_a_bit() -> None:
    layout = LatentRecords(512, 64, torch.bfloat16)
    query, records, slots = make(5, 64, 2048, layout)
    moved = torch.randperm(SLOTS, device="cuda")
    there = torch.empty_like(records)
    there[moved] = records
    here = attend_latent(query, records, slots, layout, SCALE)
    elsewhere = attend_latent(query, there, moved[slots.long()].int(), layout, SCALE)
    assert torch.equal(here.out, elsewhere.out)
    assert torch.equal(here.lse, elsewhere.lse)


def test_large_scores_do_not_overflow() -> None:
    layout = LatentRecords(512, 64, torch.bfloat16)
    query, records, slots = make(2, 64, 256, layout)
    out, lse = attend_latent(query * 100, records, slots, layout, SCALE)
    assert out.isfinite().all()
    assert lse.isfinite().all()


def test_is_captured_and_replayed_with_other_slots() -> None:
    layout = LatentRecords(512, 64, torch.bfloat16)
    query, records, slots = make(8, 64, 2048, layout)
    attend_latent(query, records, slots, layout, SCALE)  # compiled and loaded before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = attend_latent(query, records, slots, layout, SCALE)
    slots.copy_(slots.flip(0))
    query.copy_(query.flip(0))
    graph.replay()
    want = attend_latent(query, records, slots, layout, SCALE)
    assert torch.equal(recorded.out, want.out)
    assert torch.equal(recorded.lse, want.lse)


def test_no_request_and_no_slot() -> None:
    layout = LatentRecords(512, 64, torch.bfloat16)
    query, records, slots = make(2, 64, 64, layout)
    assert attend_latent(query[:0], records, slots[:0], layout, SCALE).out.shape == (0, 64, 512)
    none = attend_latent(query, records, slots[:, :0], layout, SCALE)
    assert not none.out.any()
    assert (none.lse == -math.inf).all()


@pytest.mark.parametrize(
    ("argument", "change", "message"),
    [
        ("query", lambda query: query.float(), r"query must be torch\.bfloat16"),
        ("query", lambda query: query[..., :512].contiguous(), "576"),
        ("records", lambda records: records[:, :1024].contiguous(), "1152"),
        ("slots", lambda slots: slots.long(), r"slots must be torch\.int32"),
        ("slots", lambda slots: slots[:1], "a line for each"),
        ("slots", lambda slots: slots.cpu(), "must be on cuda"),
    ],
)
def test_refuses(argument: str, change: object, message: str) -> None:
    query, records, slots = make(2, 64, 64, LatentRecords(512, 64, torch.bfloat16))
    arguments = {"query": query, "records": records, "slots": slots}
    assert callable(change)
    arguments[argument] = change(arguments[argument])
    with pytest.raises(ValueError, match=message):
        kernels.attend_latent(arguments["query"], arguments["records"], arguments["slots"], SCALE)
