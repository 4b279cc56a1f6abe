"""Prefill attention of a chunk over latent records: earlier ones tile by tile, and causally over the chunk itself.

The latent counterpart of tiled.py, with the same tiles and the same order of merging. Once a history is longer than
top_k, each query of the chunk reads only the positions that the selector chose for it: the mask hides the others.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from hisparse.attention.latent_records import LatentRecords
from hisparse.attention.partial import Partial, attend_part, merge


def attend_latent_tiled(
    query: Tensor,  # [n, heads, width], the chunk's queries, absorbed
    tiles: Iterable[Tensor],  # uint8 [m, record_bytes] each, the records before the chunk, in order
    own: Tensor,  # uint8 [n, record_bytes], the chunk's own records
    layout: LatentRecords,
    scale: float,
    selected: Tensor | None = None,  # bool [n, T], positions that each query reads; None: all up to its own
) -> Tensor:
    """Attention of a chunk over its history of T positions, the chunk's own n the last of them.

    Returns:
        [n, heads, kv_lora_rank] in the query's dtype; zeros for a query that reads nothing.
    """
    num_queries = query.shape[0]
    heads_first = query.transpose(0, 1)  # [heads, n, width]
    later = torch.ones(num_queries, num_queries, dtype=torch.bool, device=query.device).triu_(1)
    own_hidden = later if selected is None else later | ~selected[:, -num_queries:]
    result = _attend_records(heads_first, own, layout, scale, own_hidden)
    start = 0
    for tile in tiles:
        end = start + tile.shape[0]
        hidden = None if selected is None else ~selected[:, start:end]
        result = merge(result, _attend_records(heads_first, tile, layout, scale, hidden))
        start = end
    return result.out.transpose(0, 1).to(query.dtype)


def _attend_records(
    query: Tensor, records: Tensor, layout: LatentRecords, scale: float, hidden: Tensor | None
) -> Partial:
    """All heads over the same records; `hidden` [n, m] is the same for all heads."""
    key = layout.unpack(records)[None]  # [1, m, width]
    return attend_part(query, key, key[..., : layout.kv_lora_rank], scale, hidden)
