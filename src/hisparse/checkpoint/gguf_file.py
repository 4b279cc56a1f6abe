"""Reads a GGUF file's metadata and tensor table, and gives each tensor dequantised.

The reader of the `gguf` package builds a numpy view for every token of the vocabulary, which takes 5 s on the
demo model; this one takes 0.2 s and checks the file's length against its own table. Dequantisation is the
`gguf` package's. `gguf.py` and `tokenizer.py` read from it.

Source: docs/gguf.md of ggml, versions 2 and 3, little-endian.
"""

import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hisparse.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class GgufTensor(NamedTuple):
    """Where one tensor lies in the file."""

    shape: tuple[int, ...]  # in torch's order: the reverse of the file's
    quantization: int  # gguf.GGMLQuantizationType
    start: int  # bytes from the beginning of the file
    num_bytes: int


class GgufFile:
    """An opened GGUF file: `metadata` by key and `tensors` by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes = _map(path)
        self._at = len(MAGIC)
        try:
            self.version = int(self._scalar("I"))
            self._check_version()
            num_tensors, num_keys = self._scalar("Q"), self._scalar("Q")
            self.metadata: dict[str, Any] = {self._string(): self._value() for _ in range(num_keys)}
            self.tensors = self._tensor_table(num_tensors)
            self.header = self._bytes[: self._at]  # the bytes of all metadata and of the tensor table
        except (struct.error, UnicodeDecodeError, KeyError, ValueError) as error:
            raise self._damaged(f"its header breaks off or is damaged at byte {self._at} ({error})") from error
        self._check_length()

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """One tensor, dequantised, on the CPU."""
        import gguf
        import numpy as np

        tensor = self.tensors[name]
        raw = np.frombuffer(self._bytes, np.uint8, tensor.num_bytes, tensor.start)
        quantization = gguf.GGMLQuantizationType(tensor.quantization)
        try:
            values = gguf.dequantize(raw.reshape(*tensor.shape[:-1], -1), quantization)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self.path}: tensor {name} is quantised as {quantization.name}, which the gguf package cannot "
                "dequantise; use a file in another quantisation, such as Q4_K_M or Q8_0"
            ) from error
        return torch.tensor(values, dtype=dtype)

    def _check_version(self) -> None:
        if self.version not in VERSIONS:
            raise CheckpointError(
                f"{self.path}: GGUF version {self.version} is not supported; supported: 2 and 3, little-endian. "
                "Convert the model again with a recent converter"
            )

    def _tensor_table(self, num_tensors: int) -> dict[str, GgufTensor]:
        rows = [self._tensor_row() for _ in range(num_tensors)]
        alignment = int(self.metadata.get("general.alignment", DEFAULT_ALIGNMENT))
        data = -(-self._at // alignment) * alignment
        return {name: tensor._replace(start=data + tensor.start) for name, tensor in rows}

    def _tensor_row(self) -> tuple[str, GgufTensor]:
        import gguf

        name = self._string()
        shape = tuple(reversed([int(self._scalar("Q")) for _ in range(self._scalar("I"))]))
        quantization, start = int(self._scalar("I")), int(self._scalar("Q"))
        block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(quantization)]
        num_bytes = torch.Size(shape).numel() // block * block_bytes
        return name, GgufTensor(shape, quantization, start, num_bytes)

    def _check_length(self) -> None:
        for name, tensor in self.tensors.items():
            end = tensor.start + tensor.num_bytes
            if end > len(self._bytes):
                raise self._damaged(f"tensor {name} ends at byte {end}, the file at {len(self._bytes)}")

    def _value(self) -> Any:
        kind = self._scalar("I")
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            return self._scalar(SCALARS[kind])
        kind, count = self._scalar("I"), self._scalar("Q")
        if kind == STRING:
            return [self._string() for _ in range(count)]
        return list(self._unpack(f"<{count}{SCALARS[kind]}"))

    def _string(self) -> str:
        (size,) = self._unpack("<Q")
        start, self._at = self._at, self._at + size
        if self._at > len(self._bytes):
            raise ValueError(f"a string of {size} bytes")
        return self._bytes[start : self._at].decode("utf-8")

    def _scalar(self, code: str) -> Any:
        return self._unpack(f"<{code}")[0]

    def _unpack(self, code: str) -> tuple[Any, ...]:
        values = struct.unpack_from(code, self._bytes, self._at)
        self._at += struct.calcsize(code)
        return values

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is truncated or damaged: {what}; download it again")


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise CheckpointError(f"{path} is not a GGUF file: it does not begin with {MAGIC!r}")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}; pass an existing GGUF file") from error
