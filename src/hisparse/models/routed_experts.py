"""Routed experts: of many small MLPs, each token passes through the few that a router gives the best scores.

`sparse_mla.py` has one `RoutedExperts` in each layer that is not dense. Scores are sigmoids in float32; a bias
that training uses to balance the load decides who is chosen, but not how much it counts. Some models first
choose groups of experts, as they lay on machines in training (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hisparse.errors import CheckpointError
from hisparse.models.config_values import Config, boolean, positive_float, positive_int

NUM_RATED = 2  # experts of a group whose scores, summed, are the group's
SMALLEST_SUM = 1e-20  # keeps a token whose scores are all zero from dividing by it


@dataclass(frozen=True)
class ExpertsConfig:
    """The experts of one layer. Sizes are in elements."""

    num_experts: int
    num_chosen: int
    expert_size: int
    shared_size: int  # of the shared experts, which are one MLP
    num_groups: int
    num_chosen_groups: int
    normalised: bool  # whether a token's weights sum to `scale`
    scale: float

    def __post_init__(self) -> None:
        if self.num_experts % self.num_groups or self.num_experts < NUM_RATED * self.num_groups:
            raise CheckpointError(
                f"config.json: n_routed_experts {self.num_experts} must be a multiple of n_group {self.num_groups}, "
                f"with {NUM_RATED} or more in each group"
            )
        if self.num_chosen_groups > self.num_groups:
            raise CheckpointError(
                f"config.json: topk_group {self.num_chosen_groups} must be at most n_group {self.num_groups}"
            )
        num_eligible = self.num_experts // self.num_groups * self.num_chosen_groups
        if self.num_chosen > num_eligible:
            raise CheckpointError(
                f"config.json: num_experts_per_tok {self.num_chosen} must be at most {num_eligible}, "
                f"the experts of {self.num_chosen_groups} of {self.num_groups} groups"
            )

    @classmethod
    def from_dict(cls, config: Config) -> "ExpertsConfig":
        """Read a config.json dictionary. Raises `CheckpointError` for wrong or missing values."""
        expert_size = positive_int(config, "moe_intermediate_size")
        return cls(
            num_experts=positive_int(config, "n_routed_experts"),
            num_chosen=positive_int(config, "num_experts_per_tok"),
            expert_size=expert_size,
            shared_size=expert_size * positive_int(config, "n_shared_experts", 1),
            num_groups=positive_int(config, "n_group", 1),
            num_chosen_groups=positive_int(config, "topk_group", 1),
            normalised=boolean(config, "norm_topk_prob", True),
            scale=positive_float(config, "routed_scaling_factor", 1.0),
        )


class GatedMlp(NamedTuple):
    """down(silu(gate) * up): a dense layer, an expert, or the shared experts."""

    gate_up: Tensor  # [2 * inner, hidden]
    down: Tensor  # [hidden, inner]

    def __call__(self, inputs: Tensor) -> Tensor:
        """[t, hidden] -> [t, hidden]."""
        gate, up = F.linear(inputs, self.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down)


@dataclass(frozen=True)
class RoutedExperts:
    """The router and the experts of one layer."""

    config: ExpertsConfig
    router: Tensor  # [num_experts, hidden] float32
    balance: Tensor  # [num_experts] float32, added to scores for the choice only
    gate_up: Tensor  # [num_experts, 2 * expert_size, hidden]
    down: Tensor  # [num_experts, hidden, expert_size]
    shared: GatedMlp

    def __call__(self, inputs: Tensor) -> Tensor:
        """[t, hidden] -> [t, hidden]: the chosen experts, weighted, and the shared ones."""
        chosen, weights = self.route(inputs)
        if inputs.is_cuda and self._can_group:
            return self._grouped(inputs, chosen, weights) + self.shared(inputs)
        routed = torch.zeros_like(inputs)
        # Ascending, so that the order of summation is fixed.
        for expert in chosen.unique().tolist():
            token, place = (chosen == expert).nonzero(as_tuple=True)
            output = GatedMlp(self.gate_up[expert], self.down[expert])(inputs[token])
            weighted = output * weights[token, place, None]  # float32
            routed.index_add_(0, token, weighted.to(routed.dtype))
        return routed + self.shared(inputs)

    @property
    def can_be_recorded(self) -> bool:
        """Whether a call can be recorded in a CUDA graph: elsewhere torch's grouped product looks at the counts."""
        weights = self.gate_up
        return weights.is_cuda and self._can_group and torch.cuda.get_device_capability(weights.device)[0] in (9, 10)

    @property
    def _can_group(self) -> bool:
        """Torch's grouped product takes bfloat16, in lines of a multiple of 16 bytes."""
        sizes = (self.gate_up.shape[2], self.down.shape[2])
        return self.gate_up.dtype == torch.bfloat16 and not any(size % 8 for size in sizes)

    def _grouped(self, inputs: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The routed part in one product for all experts, without asking the device how many tokens each got."""
        order = chosen.flatten().argsort(stable=True)  # pairs of token and choice, by expert
        experts = torch.arange(self.config.num_experts, device=chosen.device)
        ends = (chosen.flatten()[:, None] == experts).sum(dim=0).cumsum(dim=0).int()  # [num_experts]
        taken = inputs[order // self.config.num_chosen]
        gate, up = F.grouped_mm(taken, self.gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        output = F.grouped_mm(F.silu(gate) * up, self.down.transpose(1, 2), offs=ends)
        each = torch.empty_like(output, dtype=torch.float32)
        each[order] = output * weights.flatten()[order, None]
        return each.view(*chosen.shape, -1).sum(dim=1).to(inputs.dtype)

    def route(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Experts of each token, and how much they count: both [t, num_chosen], int64 and float32."""
        scores = F.linear(inputs.float(), self.router).sigmoid()
        chosen = self._eligible(scores + self.balance).topk(self.config.num_chosen, dim=-1).indices
        weights = scores.gather(1, chosen)
        if self.config.normalised:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + SMALLEST_SUM)
        return chosen, weights * self.config.scale

    def _eligible(self, ratings: Tensor) -> Tensor:
        """The ratings [t, num_experts], minus infinity outside each token's best groups."""
        num_groups, num_chosen = self.config.num_groups, self.config.num_chosen_groups
        if num_chosen == num_groups:
            return ratings
        grouped = ratings.view(len(ratings), num_groups, -1)
        group_ratings = grouped.topk(NUM_RATED, dim=-1).values.sum(dim=-1)  # [t, num_groups]
        best = group_ratings.topk(num_chosen, dim=-1).indices
        excluded = torch.ones_like(group_ratings, dtype=torch.bool).scatter_(1, best, False)
        return grouped.masked_fill(excluded[:, :, None], float("-inf")).view_as(ratings)
