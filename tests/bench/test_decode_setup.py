"""What a decode bench accepts, and the shapes that it takes from published models."""

from typing import Any

import pytest
import torch

from hisparse.bench.decode import heading, line
from hisparse.bench.decode_setup import COLUMNS, SLICES, DecodeSetup
from hisparse.kernels.build import BuildError


def setup(**changes: Any) -> DecodeSetup:
    values: dict[str, Any] = {
        "model": "glm-5.2-slice", "batch": 4, "context": 8192, "churn": 0.13, "steps": 6, "warm_steps": 3,
        "other_us": 300.0, "early_us": 20.0,
    }  # fmt: skip
    return DecodeSetup(**{**values, **changes})


def test_glm_5_2_has_its_index_groups() -> None:
    layout = setup().layout()
    assert layout.num_layers == 78
    assert layout.groups == (0, 1, 2, *range(6, 75, 4))
    assert len(layout.groups) == 21
    assert layout.shared_layers(2) == (3, 4, 5)
    assert layout.shared_layers(74) == (75, 76, 77)
    assert layout.shared_layers(0) == ()


@pytest.mark.parametrize("model", SLICES)
def test_the_default_sizes(model: str) -> None:
    layout = setup(model=model).layout()
    assert (layout.top_k, layout.device_buffer_size, layout.record_bytes) == (2048, 4096, 1152)
    assert setup(model=model, fp8=True).layout().record_bytes == 656
    assert setup(model=model).positions >= 8192 + 9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "glm-5.3"}, "model must be one of glm-5.2-slice, .* got 'glm-5.3'"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"warm_steps": -1}, "warm_steps must be at least 0"),
        ({"rounds": 0}, "rounds must be at least 1, got 0"),
        ({"layers": 79}, "layers must be 1 to 78, those of glm-5.2-slice, got 79"),
        ({"layers": 0}, "layers must be 1 to 78"),
        ({"early_us": 400.0}, r"early_us is a part of other_us: 0 to 300\.0, got 400\.0"),
        ({"context": 1000}, "context must be at least top_k 2048, got 1000"),
        ({"other_us": 0.0}, r"other_us must be 1 to 100000 microseconds, got 0\.0"),
        ({"other_us": float("inf")}, "other_us must be 1 to 100000"),
        ({"churn": 1.5}, "churn must be a share"),
        ({"policy": "lfu"}, "policy must be one of lru, .* got 'lfu'"),
        ({"buffer": 2048}, "device_buffer_size must be above top_k"),
    ],
)
def test_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        setup(**changes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without a GPU")
def test_without_a_gpu() -> None:
    from hisparse.bench.decode import bench

    with pytest.raises(BuildError, match="no usable NVIDIA GPU"):
        next(bench([setup()]))


def test_the_table() -> None:
    result: dict[str, Any] = {
        "device": "GPU", "commit": None, "model": "glm-5.2-slice", "layers": 78, "anchors": 21, "k": 2048,
        "buffer": 4096, "record_bytes": 1152, "policy": "lru", "context": 32768, "other_us": 300.0,
        "batch": 8, "miss_rate": 0.061,
        **{f"us_a_layer_{column}": 350.0 for column in COLUMNS},
        **{f"exposed_us_a_layer_{column}": 10.0 for column in ("synchronous", "prefetch", "early")},
        "exposed_share_prefetch": 0.36, "exposed_share_early": 0.27,
    }  # fmt: skip
    names, cells = heading(result).splitlines()[-1], line(result)
    assert len(names) == len(cells)
    assert "commit unknown" in heading(result)
    assert "6.10" in cells
    assert "27 %" in cells
