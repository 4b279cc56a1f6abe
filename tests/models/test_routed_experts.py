"""One product for all experts, as a GPU does it, against one expert after the other."""

import pytest
import torch

from hisparse.models.routed_experts import ExpertsConfig, GatedMlp, RoutedExperts

HIDDEN, INNER, EXPERTS = 32, 16, 8


@pytest.mark.parametrize(("num_groups", "num_chosen_groups"), [(1, 1), (4, 2)])
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_grouped_equals_one_by_one(tokens: int, num_groups: int, num_chosen_groups: int) -> None:
    random = torch.Generator().manual_seed(tokens)

    def weights(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random) * 0.3

    config = ExpertsConfig(EXPERTS, 3, INNER, INNER, num_groups, num_chosen_groups, normalised=True, scale=2.5)
    layer = RoutedExperts(
        config,
        router=weights(EXPERTS, HIDDEN),
        balance=weights(EXPERTS),
        gate_up=weights(EXPERTS, 2 * INNER, HIDDEN),
        down=weights(EXPERTS, HIDDEN, INNER),
        shared=GatedMlp(weights(2 * INNER, HIDDEN), weights(HIDDEN, INNER)),
    )
    inputs = weights(tokens, HIDDEN)
    grouped = layer._grouped(inputs, *layer.route(inputs)) + layer.shared(inputs)
    torch.testing.assert_close(grouped, layer(inputs), rtol=1e-5, atol=1e-5)  # the order of the sums differs
