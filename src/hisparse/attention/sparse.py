"""Sparse decode attention: one query a request, over the records at the slots that resolve handed out.

Here in torch, which is the reference; on a GPU in half precision by triton (triton_kernels.py).
"""

from torch import Tensor

from hisparse.attention.grouped_records import GroupedRecords
from hisparse.attention.partial import attend_part
from hisparse.attention.triton_choice import can_use_triton


def attend(query: Tensor, records: Tensor, slots: Tensor, layout: GroupedRecords) -> Tensor:
    """Attention of each query over its slots, scaled by head_dim ** -0.5.

    Args:
        query: [b, num_heads, head_dim]; the query heads of a KV head are neighbours.
        records: uint8 [N, record_bytes], one layer's slots.
        slots: int [b, k], -1 pads; what stands in the pool for a pad is never read into the result.
        layout: what stands in a record.

    Returns:
        [b, num_heads, head_dim] in the query's dtype; zeros for a request all of whose slots are pads.
    """
    batch, num_heads, head_dim = query.shape
    if can_use_triton(query, layout.dtype, head_dim) and records.is_contiguous():
        from hisparse.attention.triton_kernels import attend_grouped

        elements = records.view(layout.dtype)
        return attend_grouped(
            query.contiguous(), elements, slots.int().contiguous(), layout.num_kv_heads, head_dim**-0.5
        )
    hidden = slots < 0
    gathered = records.index_select(0, slots.clamp(min=0).flatten())
    gathered[hidden.flatten()] = 0
    key, value = layout.unpack(gathered.view(batch, slots.shape[1], -1))  # [b, k, num_kv_heads, head_dim]
    grouped = query.view(batch, layout.num_kv_heads, num_heads // layout.num_kv_heads, head_dim)
    part = attend_part(grouped, key.transpose(1, 2), value.transpose(1, 2), head_dim**-0.5, hidden[:, None, None, :])
    return part.out.reshape(query.shape).to(query.dtype)
