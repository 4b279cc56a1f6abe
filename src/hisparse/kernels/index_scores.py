"""Score a history with the lightning indexer on the GPU: cuda/index_scores.cu. `selectors/dsa.py` specifies it."""

import torch
from torch import Tensor

from hisparse.kernels.checks import check_length, check_requests, check_tensor
from hisparse.kernels.launch import Kernel, launch, load, max_resident_blocks
from hisparse.kernels.params import IndexScoresParams
from hisparse.kernels.registration import register
from hisparse.layout import PAGE_RECORDS

THREADS = 512
PAGES_A_BLOCK = THREADS // 128  # at a time
SCALE_BYTES = 4
MOST_HEAD_DIM = 128  # two pages of keys fit a block's registers
MOST_SHARED_BYTES = 96 * 1024  # of queries and weights


def supports(num_heads: int, head_dim: int, dtype: torch.dtype, *, fp8: bool) -> bool:
    """Whether there is a kernel for such queries, and keys of the same dtype or FP8."""
    piece = 64 if fp8 else 32
    whole = num_heads % 8 == 0 and head_dim % piece == 0 and head_dim <= MOST_HEAD_DIM
    return dtype == torch.bfloat16 and whole and _shared_bytes(num_heads, head_dim) <= MOST_SHARED_BYTES


def index_scores(
    state: Tensor, page_table: Tensor, lengths: Tensor, query: Tensor, weights: Tensor, *, fp8: bool = False
) -> Tensor:
    """The score of every position of each history. Nothing is read back, so it can be captured.

    Args:
        state: bf16 [num_pages, 64, head_dim], or uint8 [num_pages, 64 * (head_dim + 4)] with `fp8`: one layer's keys.
        page_table: int32 [b, p], pages of each request in order; entries past its last are not read.
        lengths: int64 [b], positions of each history.
        query: bf16 [b, index_heads, head_dim].
        weights: float32 [b, index_heads].
        fp8: which of the two.

    Returns:
        float32 [b, p * 64]; past a length there may be anything.

    Raises:
        ValueError: an argument of another dtype, shape or device, or a shape without a kernel (`supports`).
        BuildError: the kernel cannot be compiled or launched here.
    """
    batch, num_heads, head_dim = query.shape
    check_requests(batch)
    check_tensor(query, "query", torch.bfloat16, state, 3)
    check_tensor(weights, "weights", torch.float32, state, 2)
    check_tensor(page_table, "page_table", torch.int32, state, 2)
    check_tensor(lengths, "lengths", torch.int64, state, 1)
    page = [PAGE_RECORDS * (head_dim + SCALE_BYTES)] if fp8 else [PAGE_RECORDS, head_dim]
    check_tensor(state, "state", torch.uint8 if fp8 else torch.bfloat16, state, 1 + len(page))
    if list(state.shape[1:]) != page:
        raise ValueError(f"state must be [num_pages, *{page}], got {list(state.shape)}")
    if not supports(num_heads, head_dim, query.dtype, fp8=fp8):
        raise ValueError(f"there is no kernel for {num_heads} index heads of {head_dim} elements (FP8 keys: {fp8})")
    for name, tensor in (("weights", weights), ("page_table", page_table), ("lengths", lengths)):
        check_length(tensor, name, batch)
    scores = torch.empty(batch, page_table.shape[1] * PAGE_RECORDS, device=state.device)
    torch.ops.hisparse.index_scores(state, page_table, lengths, query, weights, scores, fp8)
    return scores


def load_index_scores(num_heads: int, head_dim: int, device: torch.device, *, fp8: bool) -> Kernel:
    """The kernel for queries of a shape."""
    defines = {"FP8": int(fp8), "HEAD_DIM": head_dim, "HEADS": num_heads, "THREADS": THREADS}
    return load("index_scores.cu", "index_scores", IndexScoresParams, device, **defines)


def _shared_bytes(num_heads: int, head_dim: int) -> int:
    columns = -(-head_dim // 64)  # of 128 bytes a head
    return num_heads * (columns * 128 + 4)


def _launch(
    state: Tensor, page_table: Tensor, lengths: Tensor, query: Tensor, weights: Tensor, scores: Tensor, fp8: bool
) -> None:
    batch, num_heads, head_dim = query.shape
    if not scores.numel():
        return
    kernel = load_index_scores(num_heads, head_dim, state.device, fp8=fp8)
    params = IndexScoresParams(
        keys=state.data_ptr(),
        page_table=page_table.data_ptr(),
        lengths=lengths.data_ptr(),
        query=query.data_ptr(),
        weights=weights.data_ptr(),
        scores=scores.data_ptr(),
        max_pages=page_table.shape[1],
    )
    shared_bytes = _shared_bytes(num_heads, head_dim)
    resident = max_resident_blocks(kernel, THREADS, shared_bytes)
    blocks = max(min(resident // batch, -(-page_table.shape[1] // PAGES_A_BLOCK)), 1)
    launch(kernel, params, (blocks, batch), THREADS, shared_bytes=shared_bytes, overlaps=True)


register(
    "index_scores(Tensor state, Tensor page_table, Tensor lengths, Tensor query, Tensor weights, Tensor(a!) scores, "
    "bool fp8)",
    _launch,
)
