"""Bytes of a model's weights, stored as its configuration says, in all and on each GPU.

With tensor-parallel attention (tp) everything is divided evenly over the GPUs. With data-parallel attention (dp) each
GPU attends for requests of its own, so attention, indexer and norms are on every one of them; experts, dense MLPs,
embedding and head are divided.
"""

import math
from typing import NamedTuple

from hisparse.checkpoint.tiny_mla import NEVER_QUANTISED
from hisparse.models import SparseMlaConfig
from hisparse.plan.planned_model import PlannedModel

DIVIDED = (".mlp.", "embed_tokens", "lm_head")
FP8_BYTES, SCALE_BYTES = 1, 4


class WeightBytes(NamedTuple):
    """Where the weights' bytes are."""

    num_parameters: int
    total: int  # of one copy
    attention: int  # of it: attention, indexer and norms

    def per_gpu(self, gpus: int, *, data_parallel: bool) -> int:
        """Bytes on each of `gpus`."""
        on_all = self.attention if data_parallel else 0
        return on_all + -(-(self.total - on_all) // gpus)

    def scaled_to(self, total: int) -> "WeightBytes":
        """The same model stored in another total, with the same share for attention."""
        return WeightBytes(self.num_parameters, total, self.attention * total // self.total)


def weight_bytes(model: PlannedModel) -> WeightBytes:
    """Sum over the tensors that the model needs."""
    parameters = total = attention = 0
    for name, shape in model.weight_shapes().items():
        stored = _stored_bytes(model, name, shape)
        parameters += math.prod(shape)
        total += stored
        attention += 0 if any(part in name for part in DIVIDED) else stored
    return WeightBytes(parameters, total, attention)


def _stored_bytes(model: PlannedModel, name: str, shape: tuple[int, ...]) -> int:
    """FP8 with a float32 scale a block, where the configuration has blocks; else the dtype."""
    block = model.config.weight_block if isinstance(model.config, SparseMlaConfig) else None
    plain = (*NEVER_QUANTISED, *model.kept_plain)
    if block is None or len(shape) < 2 or any(part in name for part in plain):
        return math.prod(shape) * model.dtype.itemsize
    num_blocks = math.ceil(shape[0] / block[0]) * math.ceil(shape[1] / block[1])
    return math.prod(shape) * FP8_BYTES + num_blocks * SCALE_BYTES
