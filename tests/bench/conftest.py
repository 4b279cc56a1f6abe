"""A small recorded trace."""

from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """An .npz as recorded from a model: 6 steps, 3 layers, 2 bands, k = 16; layer l's positions go up by l + 1."""
    delta = np.zeros((6, 3, 2, 16), np.uint16)
    for layer in range(3):
        delta[:, layer, 0] = layer + 1
        delta[:, layer, 0, 0] = np.arange(6) * 5
    path = tmp_path / "recorded.npz"
    np.savez(path, delta=delta)
    return path
