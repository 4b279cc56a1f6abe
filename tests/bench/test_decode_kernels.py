"""The benches of a decode step's kernels: what they refuse, and how a result reads."""

import pytest
import torch

from hisparse.bench import attention, indexer
from hisparse.kernels.build import BuildError

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without a GPU")


@without_gpu
def test_without_a_gpu() -> None:
    for results in (attention.bench([1], 64, 2048, None), indexer.bench([1], [4096], [32], 2048, None)):
        with pytest.raises(BuildError, match="no usable NVIDIA GPU"):
            next(results)


def test_sizes() -> None:
    for results, message in (
        (attention.bench([0], 64, 2048, None), "batch must be at least 1, got 0"),
        (attention.bench([1], 0, 2048, None), "heads must be at least 1"),
        (attention.bench([1], 64, 5000, None), "k must be at most 4096, the slots of a request here, got 5000"),
        (indexer.bench([1], [0], [32], 2048, None), "context must be at least 1, got 0"),
        (indexer.bench([1], [4096], [32], 0, None), "k must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            next(results)


def test_memory_rates() -> None:
    assert indexer.memory_rate("NVIDIA H200") == 4800
    with pytest.raises(ValueError, match="of NVIDIA T4 is not known here: give --gb-per-s"):
        indexer.memory_rate("NVIDIA T4")


def test_lines() -> None:
    found = {"hisparse": {"us": 26.0, "error": 0.001}, "flashinfer fa3": {"us": 24.0, "error": 0.001}}
    result = {"batch": 16, "candidates": found, "ratio_to_best_other": 1.083}
    assert attention.line(result) == (
        "batch 16: hisparse 26.0 us (error 0.0010), flashinfer fa3 24.0 us (error 0.0010); 1.08 of the best other"
    )
    assert attention.line({**result, "ratio_to_best_other": None}).endswith("(error 0.0010)")


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    (result,) = attention.bench([2], 64, 256, "here")
    assert result["candidates"]["hisparse"]["error"] < 0.02
    results = list(indexer.bench([2], [4096], [32], 256, "here"))
    assert [result["keys"] for result in results] == ["bf16", "fp8"]
    assert all(result["us"] > 0 for result in results)
    assert "of reading the keys" in indexer.line(results[0])
