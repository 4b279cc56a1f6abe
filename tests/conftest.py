"""GPU tests skip here and nowhere else; HISPARSE_REQUIRE_GPU=1 turns the skips into failures."""

import os

import pytest
import torch

REQUIRED = os.environ.get("HISPARSE_REQUIRE_GPU") == "1"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None or torch.cuda.is_available():
        return
    if REQUIRED:
        pytest.fail("HISPARSE_REQUIRE_GPU=1, but torch sees no GPU")
    pytest.skip("needs a CUDA device")
