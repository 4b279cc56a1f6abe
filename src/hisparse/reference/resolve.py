"""Selection in, slots out: look up every selected row, then claim slots for the missing ones and fetch them."""

from typing import NamedTuple

import torch
from torch import Tensor

from hisparse.device_pool import SlotTables, hit
from hisparse.order import Policy
from hisparse.reference.claim import claim
from hisparse.reference.replay import replay


class Resolved(NamedTuple):
    """What one resolve did."""

    slots: Tensor  # int32 [b, k]: where each selected row is, -1 where the selection was a pad
    hits: int  # selected positions that were in the device pool
    misses: int  # records fetched
    failed: int  # rows that found no slot: the selections do not fit the pool
    exhausted: bool  # the order ran out and was made again on the spot
    miss_rows: Tensor  # int64 [m]: the miss plan, rows fetched ...
    miss_slots: Tensor  # int64 [m]: ... and the slots they went to


def resolve(
    tables: SlotTables,  # of one index group
    rows: Tensor,  # [b, k] int64, distinct in a request, -1 pads
    step: int,
    policy: Policy,
    host: Tensor,  # [rows, record_bytes] uint8, this layer's part of the host pool
    pool: Tensor,  # [N, record_bytes] uint8, this layer's slots
    *,
    io: bool = True,  # False: the tables alone
) -> Resolved:
    """Bring every selected row into the device pool and say where it is.

    All lookups precede the first claim, and a hit's stamp is raised before anything is evicted: a claim
    never takes a slot that this selection reads. A row that several requests miss is fetched once.
    """
    selected = rows >= 0
    wanted = rows[selected]
    found = tables.slot_of_row[wanted]
    is_hit = found >= 0
    tables.stamp[found[is_hit].long()] = hit(step)
    missing = wanted[~is_hit].unique()
    slots, exhausted = claim(tables, missing, step, policy)
    fetched_rows = missing[: slots.numel()]
    if io:
        replay(fetched_rows, slots, host, pool)
    out = torch.full(rows.shape, -1, dtype=torch.int32, device=rows.device)
    out[selected] = tables.slot_of_row[wanted]
    return Resolved(
        slots=out,
        hits=int(is_hit.sum()),
        misses=slots.numel(),
        failed=missing.numel() - slots.numel(),
        exhausted=exhausted,
        miss_rows=fetched_rows,
        miss_slots=slots,
    )
