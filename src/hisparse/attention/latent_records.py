"""What stands in a record of latent attention (MLA): one compressed vector that all heads share, then its rope part.

The runner packs records and hands them to the cache as bytes; attention unpacks what it reads from slots or
tiles. In the plain layout a record is `kv_lora_rank + rope_dim` elements (1,152 bytes for 512 + 64 in bfloat16). In
the FP8 layout, FlashMLA's, the latent elements take a byte each and groups of 128 share a float32 scale, while the
rope part stays bfloat16 because its error would move whole positions (656 bytes for 512 + 64). The conversion to FP8
is here too; the DSA selector keeps its index keys in the same format.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from hisparse.layout import RECORD_ALIGNMENT

FP8_GROUP = 128  # elements that share a scale
FP8_LARGEST = 448.0  # of float8 e4m3
SCALE_BYTES = torch.float32.itemsize


def to_fp8(values: Tensor) -> tuple[Tensor, Tensor]:
    """Each group's largest magnitude becomes 448; the last group may be short.

    Args:
        values: [..., d], floating point.

    Returns:
        float8_e4m3fn [..., d] and float32 scales [..., ceil(d / 128)]; a value is its element times its scale. The
        error is at most the larger of |value| / 16 and scale / 1024. A group of zeros stays exactly zero. Finite
        values never turn into NaN; a value that is not finite spoils its own group and no other.
    """
    width = values.shape[-1]
    groups = pad(values.float(), (0, -width % FP8_GROUP)).unflatten(-1, (-1, FP8_GROUP))
    # a scale below the normal range would be imprecise itself, or zero
    scales = (groups.abs().amax(dim=-1) / FP8_LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    scaled = (groups / scales[..., None]).flatten(-2)[..., :width]
    return scaled.to(torch.float8_e4m3fn), scales


def from_fp8(values: Tensor, scales: Tensor) -> Tensor:
    """What `to_fp8` made, as float32 [..., d]."""
    width = values.shape[-1]
    return values.float() * scales.repeat_interleave(FP8_GROUP, dim=-1)[..., :width]


@dataclass(frozen=True)
class LatentRecords:
    """The record of one latent vector and one rope part.

    Args:
        kv_lora_rank: elements of the latent vector, which are also the values that attention sums.
        rope_dim: elements of the rope part.
        dtype: of the elements in the plain layout.
        fp8: the FP8 layout: latent in float8 e4m3, then float32 scales, then the rope part in bfloat16.

    Raises:
        ValueError: an FP8 layout whose scales would not lie at a multiple of four bytes.
    """

    kv_lora_rank: int
    rope_dim: int
    dtype: torch.dtype
    fp8: bool = False

    def __post_init__(self) -> None:
        if self.fp8 and self.kv_lora_rank % SCALE_BYTES:
            raise ValueError(f"an FP8 record needs a kv_lora_rank that is a multiple of 4, got {self.kv_lora_rank}")

    @property
    def width(self) -> int:
        """Elements of a key: the latent vector and the rope part."""
        return self.kv_lora_rank + self.rope_dim

    @property
    def record_bytes(self) -> int:
        """Bytes of one record, padded at its end with zeros to a multiple of 16; published models need no pad."""
        return -(-self._used_bytes // RECORD_ALIGNMENT) * RECORD_ALIGNMENT

    @property
    def _scales_end(self) -> int:
        return self.kv_lora_rank + -(-self.kv_lora_rank // FP8_GROUP) * SCALE_BYTES

    @property
    def _used_bytes(self) -> int:
        if self.fp8:
            return self._scales_end + self.rope_dim * torch.bfloat16.itemsize
        return self.width * self.dtype.itemsize

    def pack(self, key: Tensor) -> Tensor:
        """Keys [n, width], latent vector first and rope part behind it, to uint8 [n, record_bytes]."""
        parts = self._fp8_parts(key) if self.fp8 else (key.to(self.dtype),)
        used = torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=-1)
        return pad(used, (0, self.record_bytes - self._used_bytes))

    def _fp8_parts(self, key: Tensor) -> tuple[Tensor, ...]:
        latent, rope = key.split((self.kv_lora_rank, self.rope_dim), dim=-1)
        return *to_fp8(latent), rope.to(torch.bfloat16)

    def unpack(self, records: Tensor) -> Tensor:
        """Uint8 [..., record_bytes] to keys [..., width], whose first `kv_lora_rank` elements are the values.

        A view in `dtype` of the plain layout; float32 of the FP8 layout.
        """
        if not self.fp8:
            return records.view(self.dtype)[..., : self.width]
        latent = records[..., : self.kv_lora_rank].view(torch.float8_e4m3fn)
        scales = records[..., self.kv_lora_rank : self._scales_end].view(torch.float32)
        rope = records[..., self._scales_end : self._used_bytes].view(torch.bfloat16)
        return torch.cat((from_fp8(latent, scales), rope.float()), dim=-1)
