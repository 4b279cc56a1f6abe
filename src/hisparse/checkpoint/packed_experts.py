"""Takes apart experts that a file holds as one tensor for all, so that both layouts load alike.

Published checkpoints, and those that transformers 5.24 saves, have three matrices for each expert. transformers
holds them packed in memory (`experts.gate_up_proj` and `experts.down_proj`, the expert first) and can save them
so. `loaded.py` calls `split_packed_experts` before the weights are checked; the parts are views.
"""

import re

from torch import Tensor

PACKED = re.compile(r"(?P<experts>.+\.mlp\.experts)\.(?P<kind>gate_up|down)_proj")


def split_packed_experts(tensors: dict[str, Tensor]) -> None:
    """Replace packed experts, in place, by matrices in the published naming.

    A tensor that is not three-dimensional is left, for the weight check to complain about.
    """
    for name in list(tensors):
        found = PACKED.fullmatch(name)
        if found is None or tensors[name].dim() != 3:
            continue
        packed = tensors.pop(name)
        kinds = ("gate", "up") if found["kind"] == "gate_up" else ("down",)
        for expert, matrices in enumerate(packed.unbind()):
            for kind, matrix in zip(kinds, matrices.chunk(len(kinds)), strict=False):
                tensors[f"{found['experts']}.{expert}.{kind}_proj.weight"] = matrix
