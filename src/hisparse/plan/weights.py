"""Bytes of a model's weights, stored as its configuration says, in all and on each GPU.

With tensor-parallel attention (tp) everything is divided evenly over the GPUs. With data-parallel attention (dp) each
GPU attends for requests of its own, so attention, indexer and norms are on every one of them; experts, dense MLPs,
embedding and head are divided.
"""

import math
import re
from collections.abc import Sequence
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
    divided, plain = _any_of(DIVIDED), _any_of((*NEVER_QUANTISED, *model.kept_plain))
    block = model.config.weight_block if isinstance(model.config, SparseMlaConfig) else None
    parameters = total = attention = 0
    for name, shape in model.weight_shapes().items():
        is_quantised = block is not None and len(shape) > 1 and not plain.search(name)
        stored = _fp8_bytes(shape, block) if block and is_quantised else math.prod(shape) * model.dtype.itemsize
        parameters += math.prod(shape)
        total += stored
        attention += 0 if divided.search(name) else stored
    return WeightBytes(parameters, total, attention)


def _any_of(parts: Sequence[str]) -> re.Pattern[str]:
    """Finds any of these in a name; a published model has 60,000 of them."""
    return re.compile("|".join(re.escape(part) for part in parts))


def _fp8_bytes(shape: tuple[int, ...], block: tuple[int, int]) -> int:
    """With a float32 scale a block."""
    num_blocks = math.ceil(shape[0] / block[0]) * math.ceil(shape[1] / block[1])
    return math.prod(shape) * FP8_BYTES + num_blocks * SCALE_BYTES
