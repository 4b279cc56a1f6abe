"""A tiny model to record from."""

import pytest

from tests.engine.engines import Checkpoints, Tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints")).get("LlamaForCausalLM")
