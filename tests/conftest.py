"""GPU tests skip here and nowhere else; HISPARSE_REQUIRE_GPU=1 turns the skips into failures."""

import os
from collections.abc import Iterator

import pytest
import torch

REQUIRED = os.environ.get("HISPARSE_REQUIRE_GPU") == "1"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None or torch.cuda.is_available():
        return
    if REQUIRED:
        pytest.fail("HISPARSE_REQUIRE_GPU=1, but torch sees no GPU")
    pytest.skip("needs a CUDA device")


@pytest.fixture(params=["reference", pytest.param("kernels", marks=pytest.mark.gpu)])
def each_backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """The test runs once on each backend: everything that it makes is on that backend's device."""
    if request.param == "kernels" and (reason := request.node.get_closest_marker("reference_only")):
        pytest.skip(reason.args[0])
    torch.set_default_device("cuda" if request.param == "kernels" else "cpu")
    yield
    torch.set_default_device(None)
