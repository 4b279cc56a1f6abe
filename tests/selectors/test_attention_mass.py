"""The attention-mass selector against probabilities computed head by head."""

import pytest
import torch

from hisparse.selectors import AttentionMass
from tests.selectors.test_quest import DIM, HEADS, KV_HEADS, Histories


def selector(top_k: int) -> AttentionMass:
    return AttentionMass(top_k=top_k, num_kv_heads=KV_HEADS, head_dim=DIM)


def mass(histories: Histories, request: int) -> torch.Tensor:
    """The definition, one head after the other, in double precision."""
    keys, query = histories.keys[request].double(), histories.query[request].double()
    shares = [(keys[:, head // (HEADS // KV_HEADS)] @ query[head] / DIM**0.5).softmax(dim=0) for head in range(HEADS)]
    return torch.stack(shares).sum(dim=0)


@pytest.mark.parametrize("pieces", [1, 5])
def test_the_positions_with_the_largest_mass(pieces: int) -> None:
    chooser = selector(20)
    histories = Histories([200, 17, 64, 21], chooser, pieces)
    selection, best = histories.select_all(chooser)
    ranking = best(50).of_group(0)
    assert selection.dtype == torch.int32
    assert selection.shape == (4, 1, 20)
    for request, length in enumerate(histories.lengths.tolist()):
        wanted = mass(histories, request).sort(descending=True)
        count = min(20, length)
        assert selection[request, 0, :count].tolist() == sorted(wanted.indices[:count].tolist())
        assert (selection[request, 0, count:] == -1).all()
        ranked = min(50, length)
        assert ranking.positions[request, :ranked].tolist() == wanted.indices[:ranked].tolist()
        assert (ranking.positions[request, ranked:] == -1).all()
        torch.testing.assert_close(
            ranking.scores[request, :ranked].double(), wanted.values[:ranked].log2(), atol=1e-4, rtol=1e-4
        )
        assert (ranking.scores[request, ranked:] == -torch.inf).all()


def test_among_equals_the_lower_position_wins() -> None:
    chooser = selector(3)
    state = torch.full((2, *chooser.page_shape), torch.nan)
    chooser.append(state, torch.ones(10, dtype=torch.int64), torch.arange(10), torch.ones(10, KV_HEADS, DIM))
    found = chooser.select(state, torch.tensor([[1, -1]]), torch.tensor([10]), torch.ones(1, HEADS, DIM))
    assert found.positions.tolist() == [[[0, 1, 2]]]
    assert found.best(5).positions.tolist() == [[[0, 1, 2, 3, 4]]]


def test_half_precision_keys_are_state_and_nothing_else() -> None:
    chooser = AttentionMass(top_k=4, num_kv_heads=2, head_dim=16, dtype=torch.bfloat16)
    assert chooser.page_shape == (64, 2, 16)
    assert chooser.state_bytes_per_token == 2 * 16 * 2


def test_a_size_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="top_k must be"):
        selector(0)
