"""The selector that reads everything."""

import pytest
import torch

from hisparse.selectors import AllPositions

NOTHING = torch.empty(0)


def test_every_position_ascending_then_pads() -> None:
    selection, best = AllPositions(5).select(NOTHING, NOTHING, torch.tensor([1, 5, 3]), NOTHING)
    assert best(2).positions.tolist() == [[[0, -1]], [[0, 1]], [[0, 1]]]
    assert selection.tolist() == [[[0, -1, -1, -1, -1]], [[0, 1, 2, 3, 4]], [[0, 1, 2, -1, -1]]]
    assert selection.dtype == torch.int32


def test_history_beyond_top_k_is_an_error() -> None:
    with pytest.raises(ValueError, match="has 6 with top_k 5"):
        AllPositions(5).select(NOTHING, NOTHING, torch.tensor([2, 6]), NOTHING)
