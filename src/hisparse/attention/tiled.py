"""Dense prefill attention of a chunk: over earlier records, tile by tile, and causally over the chunk itself.

The tiles come from the workspace (or, in a resident run, from one contiguous tensor, cut at the same
places). Partial results merge by log-sum-exp, so device memory does not grow with the context.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from hisparse.attention.grouped_records import GroupedRecords
from hisparse.attention.partial import attend_part, merge


def attend_tiled(
    query: Tensor,  # [n, num_heads, head_dim], the chunk's queries
    tiles: Iterable[Tensor],  # uint8 [m, record_bytes] each, the records before the chunk, in order
    own: Tensor,  # uint8 [n, record_bytes], the chunk's own records
    layout: GroupedRecords,
) -> Tensor:
    """Causal attention of a chunk over its whole history; [n, num_heads, head_dim] in the query's dtype."""
    num_queries, num_heads, head_dim = query.shape
    heads_each = num_heads // layout.num_kv_heads
    # [n, kv, g, d] -> [kv, g * n, d]: all queries of a KV head are rows of one matrix
    grouped = query.unflatten(1, (layout.num_kv_heads, heads_each)).permute(1, 2, 0, 3).flatten(1, 2)
    scale = head_dim**-0.5
    later = torch.ones(num_queries, num_queries, dtype=torch.bool, device=query.device).triu_(1)
    result = attend_part(grouped, *_heads_first(own, layout), scale, later.repeat(heads_each, 1))
    for tile in tiles:
        result = merge(result, attend_part(grouped, *_heads_first(tile, layout), scale))
    out: Tensor = result.out.unflatten(1, (heads_each, num_queries)).permute(2, 0, 1, 3)
    return out.reshape(query.shape).to(query.dtype)


def _heads_first(records: Tensor, layout: GroupedRecords) -> tuple[Tensor, Tensor]:
    """Keys and values as [num_kv_heads, m, head_dim]."""
    key, value = layout.unpack(records)
    return key.transpose(0, 1), value.transpose(0, 1)
