"""Attend over latent records on the GPU: cuda/attend_latent.cu, then cuda/merge_latent.cu.

`attention/latent_sparse.py` specifies it. Records are those of published models, 512 latent and 64 rope elements, in
bf16 (1,152 bytes) or FP8 (656 bytes); the matrix unit that the kernel is written for is Hopper's.
"""

import math

import torch
from torch import Tensor

from hisparse.kernels.checks import check_memory, check_requests, check_tensor
from hisparse.kernels.launch import Kernel, launch, load
from hisparse.kernels.params import AttendLatentParams, MergeLatentParams
from hisparse.kernels.registration import register

LATENT, ROPE = 512, 64
WIDTH = LATENT + ROPE
RECORD_BYTES = {False: WIDTH * 2, True: LATENT + LATENT // 128 * 4 + ROPE * 2}  # by whether they are FP8
ROWS = 64  # heads of a block, and records at a time
THREADS, MERGE_THREADS = 256, 128
HOPPER = (9, 0)


def supports(query: Tensor, record_bytes: int, *, fp8: bool) -> bool:
    """Whether there is a kernel for such queries over such records on the query's device."""
    return (
        query.is_cuda
        and query.dtype == torch.bfloat16
        and query.shape[-1] == WIDTH
        and record_bytes == RECORD_BYTES[fp8]
        and torch.cuda.get_device_capability(query.device) == HOPPER
    )


def attend_latent(
    query: Tensor, records: Tensor, slots: Tensor, scale: float, *, fp8: bool = False
) -> tuple[Tensor, Tensor]:
    """Attention of each query over its slots. Nothing is read back, so it can be captured.

    How a result is rounded depends on b, k, the number of heads and the GPU, and on the order of a request's slots.

    Args:
        query: bf16 [b, heads, 576], absorbed.
        records: uint8 [N, record_bytes], one layer's slots.
        slots: int32 [b, k], -1 pads.
        scale: what scores are multiplied by before the softmax.
        fp8: records are FP8.

    Returns:
        bf16 [b, heads, 512], zeros for a request without slots; and float32 [b, heads], log of the sum of
        exponentials, -inf for such a request.

    Raises:
        ValueError: an argument of another dtype, shape or device.
        BuildError: the kernel cannot be compiled or launched here.
    """
    check_tensor(query, "query", torch.bfloat16, records, 3)
    check_tensor(records, "records", torch.uint8, records, 2)
    check_tensor(slots, "slots", torch.int32, records, 2)
    batch, heads, width = query.shape
    if width != WIDTH or records.shape[1] != RECORD_BYTES[fp8]:
        raise ValueError(
            f"query must be [b, heads, {WIDTH}] and records [N, {RECORD_BYTES[fp8]}], "
            f"got {list(query.shape)} and {list(records.shape)}"
        )
    check_requests(batch * -(-heads // ROWS))
    if slots.shape[0] != batch:
        raise ValueError(f"slots must have a line for each of the {batch} queries, got {list(slots.shape)}")
    out = torch.empty(batch, heads, LATENT, dtype=torch.bfloat16, device=query.device)
    lse = torch.empty(batch, heads, device=query.device)
    torch.ops.hisparse.attend_latent(query, records, slots, out, lse, scale, fp8)
    return out, lse


def load_attend_latent(device: torch.device, *, fp8: bool) -> tuple[Kernel, Kernel]:
    """The kernel, and the one that merges."""
    kernel = load(
        "attend_latent.cu", "attend_latent", AttendLatentParams, device, FP8=int(fp8), SHARED_BYTES=shared_bytes(fp8)
    )
    return kernel, load("merge_latent.cu", "merge_latent", MergeLatentParams, device)


def shared_bytes(fp8: bool) -> int:
    """Of `Shared` in attend_latent.cu."""
    matrix, weights, lines = ROWS * WIDTH * 2, ROWS * ROWS * 2, 6 * ROWS * 4
    keys, raw = (matrix, ROWS * RECORD_BYTES[True]) if fp8 else (2 * matrix, 16)
    return matrix + keys + weights + raw + lines


def share_of(batch: int, heads: int, k: int, multiprocessors: int) -> int:
    """Slots of a share, so that all shares fit the GPU at once, a block each."""
    room = max(multiprocessors // (batch * -(-heads // ROWS)), 1)
    return -(-k // (min(room, -(-k // ROWS)) * ROWS)) * ROWS


def _launch(query: Tensor, records: Tensor, slots: Tensor, out: Tensor, lse: Tensor, scale: float, fp8: bool) -> None:
    (batch, heads, _), k = query.shape, slots.shape[1]
    if not batch * heads * k:
        out.zero_()
        lse.fill_(-math.inf)
        return
    check_memory(query, records)
    kernel, merge = load_attend_latent(query.device, fp8=fp8)
    share = share_of(batch, heads, k, kernel.multiprocessors)
    num_shares = -(-k // share)
    shares = torch.empty(batch, num_shares, heads, LATENT, device=query.device)
    share_lse = torch.empty(batch, num_shares, heads, device=query.device)
    params = AttendLatentParams(
        query=query.data_ptr(),
        records=records.data_ptr(),
        slots=slots.data_ptr(),
        out=shares.data_ptr(),
        lse=share_lse.data_ptr(),
        scale=scale * math.log2(math.e),
        heads=heads,
        k=k,
        share=share,
    )
    blocks = (num_shares, batch * -(-heads // ROWS))
    launch(kernel, params, blocks, THREADS, shared_bytes=shared_bytes(fp8), overlaps=True)
    merge_params = MergeLatentParams(
        shares=shares.data_ptr(),
        share_lse=share_lse.data_ptr(),
        out=out.data_ptr(),
        lse=lse.data_ptr(),
        num_shares=num_shares,
    )
    launch(merge, merge_params, (heads, batch), MERGE_THREADS, overlaps=True)


register(
    "attend_latent(Tensor query, Tensor records, Tensor slots, Tensor(a!) out, Tensor(b!) lse, float scale, bool fp8)",
    _launch,
)
