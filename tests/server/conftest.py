"""One tiny checkpoint for all tests of the server, and an engine loop over it for each."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hisparse.checkpoint import Loaded, load
from hisparse.checkpoint.tiny import write_tiny
from hisparse.server.engine_loop import EngineLoop
from tests.server.serving import CONTEXT, PATIENCE_S, Served, assert_nothing_left, new_engine


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("served"), max_positions=CONTEXT)


@pytest.fixture(scope="session")
def loaded(tiny_folder: Path) -> Loaded:
    """No token stops it, so that a test knows how long an answer is."""
    return replace(load(tiny_folder), stop_token_ids=())


@pytest.fixture
def loop(loaded: Loaded) -> Iterator[EngineLoop]:
    """Running; at the end of the test nothing may be left in it."""
    loop = EngineLoop(new_engine(loaded), max_waiting=64)
    loop.start()
    yield loop
    if loop.refusal is None:
        assert_nothing_left(loop)
    loop.begin_stop(timeout_s=0)
    loop._thread.join(PATIENCE_S)
    assert not loop._thread.is_alive()


@pytest.fixture
def served(loaded: Loaded) -> Iterator[Served]:
    """A server; at the end of the test nothing may be left in it."""
    served = Served(loaded)
    yield served
    if served.loop.refusal is None:
        assert_nothing_left(served.loop)
    served.stop()


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
