"""Tiny random checkpoints, written and loaded once for all tests of the engine."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.engine.engines import Checkpoints, Tiny


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def tiny(checkpoints: Checkpoints) -> Tiny:
    """A Llama of four layers with two query heads a KV head."""
    return checkpoints.get("LlamaForCausalLM")


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from threads, and on a busy machine waiting for them costs minutes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def own_cache_folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Away from the user's cache folder, except for slow tests, which use the demo model that is kept there."""
    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setenv("HISPARSE_CACHE", str(tmp_path / "cache"))
