"""Sparse decode attention over latent records: one query a request, over the slots that resolve handed out.

All heads read the same record (one KV head): the whole of it is the key, its first `kv_lora_rank` elements are the
value. Queries come absorbed, that is, already multiplied into the latent space. Here in torch, which is the reference;
on a GPU by a kernel for the shapes of published models, or by triton for others. Hits and misses can be attended
separately as parts, and merged.
"""

from typing import NamedTuple

from torch import Tensor

from hisparse.attention.latent_records import LatentRecords
from hisparse.attention.partial import Partial, attend_part
from hisparse.attention.triton_choice import can_use_triton
from hisparse.kernels import attend_latent as kernels


class Attended(NamedTuple):
    """Attention in latent space, and what it takes to merge it with another part."""

    out: Tensor  # [b, heads, kv_lora_rank] in the query's dtype
    lse: Tensor  # [b, heads] float32, log of the sum of exponentials; -inf for a request without slots


def attend_latent(query: Tensor, records: Tensor, slots: Tensor, layout: LatentRecords, scale: float) -> Attended:
    """Attention of each query over its slots; see `attend_latent_part`. Zeros where all slots are pads.

    Records whose latent part is kept in FP8 are widened to the query's dtype by the kernel, to float32 here.
    """
    whole = query.contiguous(), slots.int().contiguous()
    if layout.dtype == query.dtype and kernels.supports(query, records.shape[1], fp8=layout.fp8):
        return Attended(*kernels.attend_latent(whole[0], records, whole[1], scale, fp8=layout.fp8))
    is_plain = not layout.fp8 and layout.record_bytes == layout.width * layout.dtype.itemsize
    can_use = can_use_triton(query, layout.dtype, layout.kv_lora_rank, layout.rope_dim)
    if can_use and is_plain and records.is_contiguous():
        from hisparse.attention import triton_kernels

        elements = records.view(layout.dtype)
        return Attended(*triton_kernels.attend_latent(whole[0], elements, whole[1], layout.kv_lora_rank, scale))
    part = attend_latent_part(query, records, slots, layout, scale)
    return Attended(part.out.to(query.dtype), part.lse)


def attend_latent_part(query: Tensor, records: Tensor, slots: Tensor, layout: LatentRecords, scale: float) -> Partial:
    """Attention over some of a request's slots, to be merged with that over the others (`hisparse.attention.merge`).

    Args:
        query: [b, heads, width], absorbed latent part first, rope part last.
        records: uint8 [N, record_bytes], one layer's slots.
        slots: int [b, k], -1 pads; what stands in the pool for a pad is never read into the result.
        layout: what stands in a record.
        scale: what scores are multiplied by before the softmax.

    Returns:
        `out` float32 [b, heads, kv_lora_rank] and `lse` float32 [b, heads].
    """
    hidden = slots < 0
    gathered = records.index_select(0, slots.clamp(min=0).flatten())
    gathered[hidden.flatten()] = 0
    key = layout.unpack(gathered.view(*slots.shape, -1))  # [b, k, width]
    return attend_part(query, key, key[..., : layout.kv_lora_rank], scale, hidden[:, None, :])
