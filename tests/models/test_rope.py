"""Inverse frequencies against transformers' own functions, at the sizes of real models."""

from typing import Any

import pytest
import torch

from hisparse.errors import CheckpointError
from hisparse.models.rope import RopeConfig, cosines_and_sines, inverse_frequencies, rotate

HEAD_DIM = 128
LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}
TABLES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "llama3"} | LLAMA3,
    {"rope_type": "yarn"} | YARN,
    {"rope_type": "yarn", "attention_factor": 1.25} | YARN,
    {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0} | YARN,
    {"rope_type": "yarn", "mscale": 0.707, "mscale_all_dim": 1.2} | YARN,
    {"rope_type": "yarn", "mscale": 0.707} | YARN,
    {"rope_type": "yarn", "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False} | YARN,
]


@pytest.mark.parametrize("table", TABLES, ids=str)
@pytest.mark.parametrize("theta", [10_000.0, 1_000_000.0])
def test_frequencies_equal_transformers(table: dict[str, Any], theta: float) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    table = table | {"rope_theta": theta}
    config = {"max_position_embeddings": 131072, "rope_parameters": table}
    oracle = LlamaConfig(head_dim=HEAD_DIM, max_position_embeddings=131072, rope_parameters=dict(table))
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS[table["rope_type"]](oracle, torch.device("cpu"))
    ours = RopeConfig.from_dict(config)
    torch.testing.assert_close(inverse_frequencies(ours, HEAD_DIM), frequencies, atol=0, rtol=1e-5)
    assert ours.attention_factor == pytest.approx(attention_factor, rel=1e-12)


def test_divisors_of_a_gguf_file_equal_the_variant_that_they_encode() -> None:
    llama3 = RopeConfig("llama3", 5e5, 32.0, 8192, 1.0, 4.0)
    exact = inverse_frequencies(llama3, HEAD_DIM)
    divisors = inverse_frequencies(RopeConfig(theta=5e5), HEAD_DIM) / exact
    stored = RopeConfig("divisors", 5e5, divisors=tuple(divisors.tolist()))
    torch.testing.assert_close(inverse_frequencies(stored, HEAD_DIM), exact, atol=0, rtol=1e-6)


def test_a_wrong_number_of_divisors_is_refused() -> None:
    with pytest.raises(CheckpointError, match="expected 64 for head_dim 128, got 2"):
        inverse_frequencies(RopeConfig("divisors", divisors=(1.0, 2.0)), HEAD_DIM)


def test_scores_depend_on_distance_only() -> None:
    vectors = torch.randn(2, 1, HEAD_DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    frequencies = inverse_frequencies(RopeConfig(), HEAD_DIM)

    def score(first: int, second: int) -> float:
        cosines, sines = cosines_and_sines(frequencies, torch.tensor([first, second]), 1.0, torch.float32)
        rotated = rotate(vectors, cosines, sines)
        return float((rotated[0] * rotated[1]).sum())

    assert score(3, 10) == pytest.approx(score(1003, 1010), abs=1e-2)
    assert score(3, 10) != pytest.approx(score(3, 40), abs=1e-2)
