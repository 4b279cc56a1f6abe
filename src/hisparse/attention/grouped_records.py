"""What stands in a record of grouped-query attention: the keys of all KV heads, then their values.

The runner packs records and hands them to the cache as bytes; attention unpacks what it reads from slots or
tiles. Only these two know what the bytes mean.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GroupedRecords:
    """The record of `num_kv_heads` keys and values of `head_dim` elements each."""

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def record_bytes(self) -> int:
        """Bytes of one record."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def pack(self, key: Tensor, value: Tensor) -> Tensor:
        """Keys and values, [n, num_kv_heads, head_dim] each, to uint8 [n, record_bytes]."""
        both = torch.stack((key, value), dim=1).to(self.dtype)
        return both.view(both.shape[0], -1).view(torch.uint8)

    def unpack(self, records: Tensor) -> tuple[Tensor, Tensor]:
        """Uint8 [..., record_bytes] to keys and values, views of [..., num_kv_heads, head_dim]."""
        both = records.view(self.dtype).unflatten(-1, (2, self.num_kv_heads, self.head_dim))
        return both.select(-3, 0), both.select(-3, 1)
