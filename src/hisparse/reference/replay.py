"""A miss plan into a shared layer of the index group: the rows and slots are those of the anchor."""

from torch import Tensor


def replay(
    rows: Tensor,  # [m] int64, what the anchor's resolve fetched
    slots: Tensor,  # [m] int64, and where to
    host: Tensor,  # [rows, record_bytes] uint8, the shared layer's part of the host pool
    pool: Tensor,  # [N, record_bytes] uint8, the shared layer's slots
) -> None:
    """Fetch the same rows into the same slots of another layer; copy only."""
    pool.index_copy_(0, slots, host.index_select(0, rows.to(host.device)).to(pool.device))
