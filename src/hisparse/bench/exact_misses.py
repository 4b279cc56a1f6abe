"""Misses by the specification: the reference resolve on the CPU over the same trace, to hold the GPU's against.

The rules are those of the bench: a layer's order is made anew after its resolve when it is due, and the layers
are independent. Rows are those of an unshuffled host pool, request by request, so that ties inside a step go by
position; the GPU, where ties have no order, may evict others of the same age.
"""

import torch
from torch import Tensor

from hisparse import reference
from hisparse.bench.resolve_setup import Setup
from hisparse.device_pool import DevicePool, SlotTables, hit
from hisparse.layout import PAGE_RECORDS, RECORD_ALIGNMENT, CacheLayout
from hisparse.order import POLICIES, Policy
from hisparse.reference.rebuild_order import order_is_due, rebuild_order


def exact_misses(setup: Setup, batch: int) -> float:
    """Misses a call of the setup's policy, over the counted steps and all layers, for the first `batch` requests."""
    traced = torch.from_numpy(setup.trace.selections[:, :, :batch].copy())  # [steps, layers or 1, b, k]
    first_rows = torch.arange(batch) * setup.pages_each * PAGE_RECORDS
    total = 0
    for layer in range(traced.shape[1]):
        rows = traced[:, layer].long() + first_rows[:, None]
        total += _layer_misses(setup, batch, rows)
    return total / (setup.counted_steps * traced.shape[1])


def _layer_misses(setup: Setup, batch: int, rows: Tensor) -> int:
    """Misses of one layer in the counted steps; `rows` int64 [steps, b, k]."""
    pages = batch * setup.pages_each
    layout = CacheLayout(1, RECORD_ALIGNMENT, setup.trace.k, setup.buffer, batch, pages)
    pool = DevicePool(layout, torch.device("cpu"))
    host = torch.zeros(layout.num_rows, RECORD_ALIGNMENT, dtype=torch.uint8)
    policy = POLICIES[setup.policy]
    misses = 0
    for step, selected in enumerate(rows, start=1):
        found = reference.resolve(pool.layer(0), selected, step, policy, host, pool.records[0])
        misses += found.misses if step > setup.warm_steps else 0
        _rebuild_if_due(pool.layer(0), step, policy)
    return misses


def _rebuild_if_due(tables: SlotTables, step: int, policy: Policy) -> None:
    if order_is_due(tables, policy):
        rebuild_order(tables, step, policy, hit(step))
