"""Trace files on disk: a writer that appends, and a reader that maps the file and decodes only what is asked for."""

import mmap
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np

from hisparse.trace.format import BLOCK, TAG, Header, Steps, decode_block, encode_block, encode_header, read_header


class _Block(NamedTuple):
    """Where a block's steps are."""

    first_step: int
    num_steps: int
    start: int  # of the payload, in bytes from the beginning of the file
    size: int
    checksum: int


class TraceWriter:
    """Appends steps to a trace file.

    Args:
        path: a new file, or with `append` one that has the same header.
        header: what the file holds.
        append: go on with a file that is there.

    Raises:
        ValueError: a file that is there without `append`, or that holds something else.
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, header: Header, *, append: bool = False) -> None:
        self.header = header
        self.path = path
        self.num_steps = 0
        if append and path.exists():
            with TraceFile(path) as found:
                _check_same(path, found.header, header)
                self.num_steps = found.num_steps
            self._file = path.open("ab")
            return
        try:
            self._file = path.open("xb")
        except FileExistsError as error:
            raise ValueError(f"the trace {path} exists already: choose another name, or append to it") from error
        self._file.write(encode_header(header))
        self._file.flush()

    def write(self, steps: Steps) -> None:
        """Append a block of steps; none: nothing. Raises `ValueError` for arrays that do not fit the header."""
        if steps.num_steps:
            self._file.write(encode_block(self.header, steps))
            self._file.flush()
            self.num_steps += steps.num_steps

    def close(self) -> None:
        """Nothing more will come."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _check_same(path: Path, found: Header, wanted: Header) -> None:
    for name in ("layers", "k", "num_ranked"):
        if getattr(found, name) != getattr(wanted, name):
            raise ValueError(
                f"the trace {path} has {name} {getattr(found, name)}, and what comes has {getattr(wanted, name)}: "
                f"write to another file"
            )


class TraceFile:
    """A trace file, mapped into memory. Blocks are decoded when their steps are asked for.

    Args:
        path: of a whole file.

    Raises:
        ValueError: a foreign, damaged or truncated file, or one of a later version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.header = read_header(file, path)
                start = file.tell()
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ValueError(f"the trace {path} cannot be read: {error.strerror or error}") from error
        self._blocks = list(self._find_blocks(start))

    @property
    def num_steps(self) -> int:
        """Steps of all blocks."""
        return sum(block.num_steps for block in self._blocks)

    def read(self, start: int = 0, stop: int | None = None) -> Steps:
        """Steps `start` to `stop` - 1; default: all.

        Raises:
            ValueError: a damaged block, or a range that the trace does not have.
        """
        stop = self.num_steps if stop is None else stop
        if not 0 <= start < stop <= self.num_steps:
            raise ValueError(f"the trace {self.path} has {self.num_steps} steps, got the range {start} to {stop}")
        parts = [
            _part(self._decode(block), start - block.first_step, stop - block.first_step)
            for block in self._blocks
            if block.first_step < stop and start < block.first_step + block.num_steps
        ]
        return Steps(*(_join(arrays) for arrays in zip(*parts, strict=True)))

    def close(self) -> None:
        """Give the map back."""
        self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _find_blocks(self, at: int) -> Iterator[_Block]:
        first_step, end = 0, len(self._map)
        while at < end:
            head = self._map[at : at + BLOCK.size]
            if len(head) < BLOCK.size:
                raise ValueError(self._truncated(first_step))
            tag, num_steps, size, checksum = BLOCK.unpack(head)
            if tag != TAG or not num_steps:
                raise ValueError(f"the trace {self.path} is damaged after step {first_step}: no block begins there")
            at += BLOCK.size
            if at + size > end:
                raise ValueError(self._truncated(first_step))
            yield _Block(first_step, num_steps, at, size, checksum)
            at, first_step = at + size, first_step + num_steps

    def _truncated(self, whole: int) -> str:
        return f"the trace {self.path} is truncated: {whole} whole steps, then a block that the file ends in"

    def _decode(self, block: _Block) -> Steps:
        payload = self._map[block.start : block.start + block.size]
        if zlib.crc32(payload) != block.checksum:
            raise ValueError(
                f"the trace {self.path} is damaged: steps {block.first_step} to "
                f"{block.first_step + block.num_steps - 1} do not match their checksum"
            )
        return decode_block(self.header, block.num_steps, payload, self.path)


def recover(path: Path) -> int:
    """Cut a truncated file back to its last whole block; the steps that are left.

    Raises:
        ValueError: a file whose header is not whole, or that is no trace.
    """
    with path.open("rb") as file:
        read_header(file, path)
        at, steps = file.tell(), 0
        while len(head := file.read(BLOCK.size)) == BLOCK.size:
            tag, num_steps, size, checksum = BLOCK.unpack(head)
            payload = file.read(size)
            if tag != TAG or len(payload) < size or zlib.crc32(payload) != checksum:
                break
            at, steps = file.tell(), steps + num_steps
    os.truncate(path, at)
    return steps


def _part(steps: Steps, start: int, stop: int) -> Steps:
    return Steps(*(None if array is None else array[max(start, 0) : stop] for array in steps))  # type: ignore[arg-type]


def _join(arrays: Sequence[Any]) -> Any:
    return None if arrays[0] is None else np.concatenate(arrays)
