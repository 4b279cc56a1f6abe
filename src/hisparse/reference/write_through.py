"""A step's new records go to their slots and, at the same time, to the host pool."""

from torch import Tensor


def write_through(
    records: Tensor,  # [b, record_bytes] uint8, the tensor that produced the records
    slots: Tensor,  # [b] int64
    rows: Tensor,  # [b] int64
    pool: Tensor,  # [N, record_bytes] uint8, one layer's slots
    host: Tensor,  # [rows, record_bytes] uint8, one layer's part of the host pool
) -> None:
    """Write each record twice. The host copy reads the source, not the slot, which may be evicted."""
    pool.index_copy_(0, slots, records.to(pool.device))
    host.index_copy_(0, rows.to(host.device), records.to(host.device))
