"""Latent records: sizes, round trips, and the FP8 conversion against float64."""

import pytest
import torch
from torch import Tensor

from hisparse.attention import LatentRecords
from hisparse.attention.latent_records import from_fp8, to_fp8


def random_keys(n: int, width: int, seed: int = 0) -> Tensor:
    """Elements of very different sizes, as latents have them."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(n, width, generator=random) * torch.randn(n, width, generator=random).exp()


def fp8_bound(values: Tensor) -> Tensor:
    """The largest error of each element: half a unit in the last place, of normal and of subnormal numbers."""
    groups = torch.nn.functional.pad(values.double(), (0, -values.shape[-1] % 128)).unflatten(-1, (-1, 128))
    scale = groups.abs().amax(dim=-1, keepdim=True) / 448
    bound = torch.maximum(groups.abs() * 2**-4, scale * 2**-10).flatten(-2)[..., : values.shape[-1]]
    return bound * (1 + 1e-6)  # scale, quotient and product are rounded to float32


@pytest.mark.parametrize(
    ("rank", "rope", "dtype", "fp8", "record_bytes"),
    [
        (512, 64, torch.bfloat16, False, 1152),
        (512, 64, torch.float32, False, 2304),
        (512, 64, torch.bfloat16, True, 656),
        (512, 64, torch.float32, True, 656),
        (32, 8, torch.float32, False, 160),
        (20, 6, torch.bfloat16, False, 64),  # 52 used
        (32, 8, torch.bfloat16, True, 64),  # 32 + 4 + 16 = 52 used
        (132, 4, torch.bfloat16, True, 160),  # 132 + 8 + 8 = 148 used
    ],
)
def test_sizes_and_round_trip(rank: int, rope: int, dtype: torch.dtype, fp8: bool, record_bytes: int) -> None:
    layout = LatentRecords(rank, rope, dtype, fp8)
    assert layout.record_bytes == record_bytes
    key = random_keys(7, rank + rope).to(dtype)
    records = layout.pack(key)
    assert records.dtype == torch.uint8
    assert list(records.shape) == [7, record_bytes]
    got = layout.unpack(records)
    if not fp8:
        assert torch.equal(got, key)
        return
    assert torch.equal(got[:, rank:], key[:, rank:].bfloat16().float())
    assert ((got[:, :rank].double() - key[:, :rank].double()).abs() <= fp8_bound(key[:, :rank])).all()


def test_packing_is_the_same_for_views_and_pads_are_zero() -> None:
    for fp8 in (False, True):
        layout = LatentRecords(36, 6, torch.bfloat16, fp8)
        key = random_keys(5, 42).bfloat16()
        records = layout.pack(key)
        assert torch.equal(layout.pack(key.t().contiguous().t()), records)
        used = 36 + 4 + 12 if fp8 else 84
        assert used < layout.record_bytes
        assert not records[:, used:].any()


def test_unpacks_any_leading_shape_and_no_records() -> None:
    layout = LatentRecords(256, 16, torch.bfloat16, fp8=True)
    records = layout.pack(random_keys(6, 272))
    want = layout.unpack(records)
    assert torch.equal(layout.unpack(records.view(2, 3, -1)), want.view(2, 3, -1))
    assert torch.equal(layout.unpack(records.repeat(1, 2)[:, : layout.record_bytes]), want)  # rows apart in memory
    assert list(layout.unpack(layout.pack(random_keys(0, 272))).shape) == [0, 272]


def test_fp8_bytes_lie_as_flashmla_has_them() -> None:
    """512 elements, four scales, the rope part: read back one by one."""
    key = random_keys(3, 576).bfloat16()
    records = LatentRecords(512, 64, torch.bfloat16, fp8=True).pack(key)
    for record, row in zip(records, key, strict=True):
        scales = record[512:528].clone().view(torch.float32)
        assert torch.equal(scales, row[:512].float().view(4, 128).abs().amax(dim=-1) / 448)
        assert torch.equal(record[528:].clone().view(torch.bfloat16), row[512:])
        for group in range(4):
            elements = record[group * 128 : (group + 1) * 128].view(torch.float8_e4m3fn)
            assert elements.float().abs().max() == 448  # the largest element uses the whole range


@pytest.mark.parametrize(
    "largest", [1.0, 1e-3, 3e4, torch.finfo(torch.bfloat16).max, torch.finfo(torch.float32).max, 1e-30]
)
@pytest.mark.parametrize("width", [1, 64, 128, 512, 520])
def test_fp8_error_is_bounded(largest: float, width: int) -> None:
    values = random_keys(50, width)
    values = values / values.abs().amax() * largest
    values[0, 0] = -largest
    got = from_fp8(*to_fp8(values))
    assert got.isfinite().all()
    assert ((got.double() - values.double()).abs() <= fp8_bound(values)).all()


def test_zeros_stay_zero() -> None:
    values = torch.zeros(2, 256)
    values[0, 128:] = random_keys(1, 128)
    elements, scales = to_fp8(values)
    assert scales.isfinite().all()
    got = from_fp8(elements, scales)
    assert torch.equal(got[1], values[1])
    assert torch.equal(got[0, :128], values[0, :128])


@pytest.mark.parametrize("largest", [1e-36, 1e-38, 1e-40, 1e-45])
def test_values_too_small_for_a_scale_are_rounded_or_lost_but_finite(largest: float) -> None:
    """Near the end of float32's range the scale stops at the smallest normal number."""
    values = random_keys(20, 128)
    values = (values.double() / values.abs().amax() * largest).float()
    elements, scales = to_fp8(values)
    got = from_fp8(elements, scales)
    bound = torch.maximum(fp8_bound(values), torch.tensor(torch.finfo(torch.float32).tiny * 2**-10).double())
    assert ((got.double() - values.double()).abs() <= bound * 1.01).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_one_bad_value_spoils_its_own_group_only(bad: float) -> None:
    values = random_keys(2, 384)
    want = from_fp8(*to_fp8(values))
    values[0, 130] = bad
    got = from_fp8(*to_fp8(values))
    assert not got[0, 130].isfinite()
    assert torch.equal(got[1], want[1])
    assert torch.equal(got[0, :128], want[0, :128])
    assert torch.equal(got[0, 256:], want[0, 256:])


def test_misplaced_scales_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 4, got 30"):
        LatentRecords(30, 8, torch.bfloat16, fp8=True)
