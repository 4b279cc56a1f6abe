"""FP8 block-scaled weights: against the definition in float64, through files, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hisparse.checkpoint import load
from hisparse.checkpoint.folder import read_tensors
from hisparse.checkpoint.fp8 import SCALE_SUFFIX, STORED, dequantise, quantise
from hisparse.checkpoint.tiny_mla import write_tiny_mla
from hisparse.errors import CheckpointError
from tests.checkpoint.test_folder import rewrite_config, rewrite_tensors
from tests.models.loading import load_sparse_mla
from tests.models.resident_latents import ResidentLatents

BLOCK = (128, 128)
QUERY_DOWN = "model.layers.0.self_attn.q_a_proj.weight"
SHAPES = [(128, 128), (256, 384), (576, 200), (1, 1), (130, 127), (3, 200, 130)]


def random_fp8(shape: tuple[int, ...], block: tuple[int, int] = BLOCK) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    stored = torch.randn(shape, generator=generator).to(STORED)
    num_blocks = [-(-size // part) for size, part in zip(shape[-2:], block, strict=True)]
    return stored, torch.rand((*shape[:-2], *num_blocks), generator=generator) + 0.5


def exactly(stored: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Each element times the scale of its block, one by one, in float64."""
    rows = torch.arange(stored.shape[-2]) // block[0]
    columns = torch.arange(stored.shape[-1]) // block[1]
    return stored.double() * scales.double()[..., rows[:, None], columns]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_value_is_the_number_times_its_blocks_scale(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    stored, scales = random_fp8(shape)
    tensors = {"w": stored, "w" + SCALE_SUFFIX: scales, "other": torch.ones(2)}
    dequantise(tensors, BLOCK, dtype, Path("folder"))
    assert tensors.keys() == {"w", "other"}
    # float32 rounds the product once; bfloat16 rounds that once more
    assert torch.equal(tensors["w"], exactly(stored, scales, BLOCK).float().to(dtype))


@pytest.mark.parametrize("block", [(32, 32), (64, 128), (1, 16), (10**12, 10**12)], ids=str)
def test_other_block_sizes(block: tuple[int, int]) -> None:
    stored, scales = random_fp8((100, 90), block)
    tensors = {"w": stored, "w" + SCALE_SUFFIX: scales}
    dequantise(tensors, block, torch.float32, Path("folder"))
    assert torch.equal(tensors["w"], exactly(stored, scales, block).float())


def test_scales_that_are_powers_of_two_in_eight_bits() -> None:
    stored, scales = random_fp8((256, 256))
    small = scales.to(torch.float8_e8m0fnu)
    tensors = {"w": stored, "w" + SCALE_SUFFIX: small}
    dequantise(tensors, BLOCK, torch.float32, Path("folder"))
    assert torch.equal(tensors["w"], exactly(stored, small.float(), BLOCK).float())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantise_and_back(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.02
    stored, scales = quantise(weight, BLOCK)
    tensors = {"w": stored, "w" + SCALE_SUFFIX: scales}
    dequantise(tensors, BLOCK, torch.float32, Path("folder"))
    # three bits of mantissa, and below the smallest normal number steps of 2^-9 of a scale
    torch.testing.assert_close(tensors["w"], weight, rtol=2**-4, atol=float(scales.max()) * 2**-9)


def test_zeros_stay_zeros() -> None:
    stored, scales = quantise(torch.zeros(4, 4), BLOCK)
    tensors = {"w": stored, "w" + SCALE_SUFFIX: scales}
    dequantise(tensors, BLOCK, torch.float32, Path("folder"))
    assert torch.equal(tensors["w"], torch.zeros(4, 4))


@pytest.mark.parametrize(
    ("tensors", "block", "message"),
    [
        ({"a.weight": (2, 2)}, BLOCK, "a.weight is FP8, but its scales a.weight_scale_inv are missing"),
        ({"a.weight": (2, 2)}, None, "a.weight is FP8, but config.json has no quantization_config"),
        (
            {"a.weight": (129, 128), "a.weight_scale_inv": (1, 1)},
            BLOCK,
            r"a.weight has scales of shape \[1, 1\], expected \[2, 1\] for \[129, 128\] in blocks of 128 x 128",
        ),
        ({"a.weight": (5,), "a.weight_scale_inv": (1,)}, BLOCK, r"a.weight is FP8 of shape \[5\]; only matrices"),
    ],
    ids=["no scales", "no config", "scales of another shape", "a vector"],
)
def test_refused(tensors: dict[str, Any], block: tuple[int, int] | None, message: str) -> None:
    made = {
        name: torch.zeros(shape, dtype=torch.float32 if name.endswith(SCALE_SUFFIX) else STORED)
        for name, shape in tensors.items()
    }
    with pytest.raises(CheckpointError, match=f"^some folder: {message}"):
        dequantise(made, block, torch.float32, Path("some folder"))


@pytest.mark.parametrize("scale", [torch.nan, torch.inf, -1.0])
def test_scales_are_finite_and_not_negative(scale: float) -> None:
    stored, scales = random_fp8((256, 128))
    scales[1, 0] = scale
    with pytest.raises(CheckpointError, match=rf"^folder: w_scale_inv must be finite .* got {scale} \(1 such of 2\)"):
        dequantise({"w": stored, "w" + SCALE_SUFFIX: scales}, BLOCK, torch.float32, Path("folder"))


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, STORED])
def test_scales_are_floats(dtype: torch.dtype) -> None:
    stored, scales = random_fp8((256, 128))
    with pytest.raises(CheckpointError, match=rf"^folder: w_scale_inv is {dtype}; scales must be one of torch.float32"):
        dequantise({"w": stored, "w" + SCALE_SUFFIX: scales.to(dtype)}, BLOCK, torch.float32, Path("folder"))


def test_another_fp8_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"a\.weight is torch\.float8_e5m2; FP8 weights must be"):
        dequantise({"a.weight": torch.zeros(2, 2, dtype=torch.float8_e5m2)}, BLOCK, torch.float32, Path("folder"))


@pytest.mark.parametrize("packed", [False, True], ids=["published experts", "packed experts"])
def test_an_fp8_checkpoint_is_the_model_of_its_dequantised_weights(packed: bool, tmp_path: Path) -> None:
    fp8 = write_tiny_mla(tmp_path / "fp8", "glm-5.2", fp8=True, packed_experts=packed)
    stored = read_tensors(fp8)
    assert stored[QUERY_DOWN].dtype == STORED
    assert sum(tensor.dtype == STORED for tensor in stored.values()) > 50
    plain = write_tiny_mla(tmp_path / "plain", "glm-5.2")
    dequantise(stored, (32, 32), torch.float32, fp8)
    everything: dict[str, Tensor | None] = dict.fromkeys(read_tensors(plain))  # leaves, and makes room for the others
    everything.update(stored)
    rewrite_tensors(plain, everything)
    tokens, where = torch.arange(40), torch.arange(40)
    logits = []
    for folder in (fp8, plain):
        model = load_sparse_mla(folder)
        logits.append(model.logits(model.forward(tokens, where, ResidentLatents(model.config))))
    assert torch.equal(*logits)


def test_a_checkpoint_without_a_scale_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_mla(tmp_path, "deepseek-v3.2", fp8=True)
    rewrite_tensors(folder, {QUERY_DOWN + SCALE_SUFFIX: None})
    with pytest.raises(CheckpointError, match=f"{folder}: {QUERY_DOWN} is FP8, but its scales .* are missing"):
        load(folder)


def test_a_scale_without_fp8_is_unexpected(tmp_path: Path) -> None:
    folder = write_tiny_mla(tmp_path, "deepseek-v3.2", fp8=True)
    rewrite_tensors(folder, {QUERY_DOWN: read_tensors(folder)[QUERY_DOWN].float()})
    with pytest.raises(CheckpointError, match=rf"1 unexpected \({QUERY_DOWN}{SCALE_SUFFIX}\)"):
        load(folder)


def test_fp8_without_a_quantization_config(tmp_path: Path) -> None:
    folder = write_tiny_mla(tmp_path, "deepseek-v3.2", fp8=True)
    rewrite_config(folder, {"quantization_config": None})
    with pytest.raises(CheckpointError, match=r"is FP8, but config\.json has no quantization_config"):
        load(folder)
