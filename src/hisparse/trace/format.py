"""The project's own trace file: one request's selections, appended block by block while it runs (docs/traces.md).

A header says what was recorded; each block holds some steps, compressed, with a checksum. A file that was cut short
while it was written is told from a whole one, and so is one of another version.
"""

import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hisparse.trace.trace import is_whole

MAGIC = b"HSTRACE\n"
VERSION = 1
SUFFIX = ".hst"
PREAMBLE = struct.Struct("<8sIII")  # magic, version, bytes of the header's JSON, its checksum
BLOCK = struct.Struct("<4sIQI")  # tag, steps, bytes of the payload, its checksum
TAG = b"STEP"
LEVEL = 6  # of zlib
PAD = np.iinfo(np.uint32).max  # in `ranked`


@dataclass(frozen=True)
class Header:
    """What a file holds.

    Args:
        layers: the layers that select, by their numbers.
        k: the most positions in a selection.
        num_ranked: best-scored positions kept with their scores, for each selection; 0: none.
        about: model, selector, context, source: for people, and for choosing traces.

    Raises:
        ValueError: a size that cannot be.
    """

    layers: tuple[int, ...]
    k: int
    num_ranked: int = 0
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.layers or not is_whole(self.k, 1):
            raise ValueError(f"a trace needs layers and a k of at least 1, got {len(self.layers)} layers, k {self.k!r}")
        if self.num_ranked != 0 and not is_whole(self.num_ranked, self.k):
            raise ValueError(f"a trace keeps no scores or those of at least k = {self.k}, got {self.num_ranked!r}")
        if not all(is_whole(layer, 0) for layer in self.layers) or len(set(self.layers)) < len(self.layers):
            raise ValueError(f"layers of a trace are distinct whole numbers from 0 on, got {list(self.layers)}")
        if not isinstance(self.about, Mapping):
            raise ValueError(f"'about' of a trace must be an object, got {self.about!r}")


class Steps(NamedTuple):
    """Some steps of a trace."""

    newest: NDArray[np.int32]  # [steps]: the position that each step produces
    selection: NDArray[np.int32]  # [steps, layers, k], ascending, -1 pads last
    ranked: NDArray[np.int32] | None = None  # [steps, layers, num_ranked], best first, -1 pads last
    scores: NDArray[np.float16] | None = None  # the same shape

    @property
    def num_steps(self) -> int:
        """How many."""
        return len(self.newest)


def encode_header(header: Header) -> bytes:
    """The first bytes of a file."""
    text = json.dumps(asdict(header), ensure_ascii=False).encode()
    return PREAMBLE.pack(MAGIC, VERSION, len(text), zlib.crc32(text)) + text


def read_header(file: BinaryIO, path: Path) -> Header:
    """Read a file's header from its beginning; the file then stands at its first block.

    Raises:
        ValueError: another kind of file, a later version, or a damaged header.
    """
    start = file.read(PREAMBLE.size)
    if start[: len(MAGIC)] != MAGIC:
        raise ValueError(f"{path} is not a trace: it does not begin with {MAGIC.decode().strip()!r}")
    if len(start) < PREAMBLE.size:
        raise ValueError(f"the trace {path} is truncated: it ends inside its header")
    _, version, size, checksum = PREAMBLE.unpack(start)
    if version != VERSION:
        raise ValueError(
            f"the trace {path} has format version {version}, and this hisparse reads version {VERSION}: upgrade it"
        )
    text = file.read(size)
    if len(text) < size:
        raise ValueError(f"the trace {path} is truncated: it ends inside its header")
    if zlib.crc32(text) != checksum:
        raise ValueError(f"the trace {path} is damaged: its header does not match its checksum")
    return _parse_header(text, path)


def _parse_header(text: bytes, path: Path) -> Header:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ValueError(f"the trace {path} has a header that is not JSON: {error}") from error
    names = [each.name for each in fields(Header)]
    missing = [name for name in names if not isinstance(values, dict) or name not in values]
    if missing:
        raise ValueError(f"the trace {path} has a header that names no {', '.join(missing)}")
    if not isinstance(values["layers"], list):
        raise ValueError(f"the trace {path} has a header whose 'layers' must be a list, got {values['layers']!r}")
    try:
        return Header(tuple(values["layers"]), *(values[name] for name in names[1:]))
    except ValueError as error:
        raise ValueError(f"the trace {path} has a wrong header: {error}") from error


def encode_block(header: Header, steps: Steps) -> bytes:
    """Steps as a block. Raises `ValueError` for arrays that do not fit the header."""
    _check_steps(header, steps)
    chosen = steps.selection >= 0
    parts = [
        steps.newest.astype("<i4").tobytes(),
        chosen.sum(axis=-1, dtype=np.uint32).astype("<u4").tobytes(),
        _planes(_gaps(steps.selection)),
    ]
    if steps.ranked is not None and steps.scores is not None:
        parts += [_planes(steps.ranked.astype(np.uint32)), _planes(steps.scores)]
    payload = zlib.compress(b"".join(parts), LEVEL)
    return BLOCK.pack(TAG, steps.num_steps, len(payload), zlib.crc32(payload)) + payload


def decode_block(header: Header, num_steps: int, payload: bytes | memoryview, path: Path) -> Steps:
    """The steps of a block's payload. Raises `ValueError` if it does not hold what the header says."""
    lines = num_steps * len(header.layers)
    shape = (num_steps, len(header.layers))
    sizes = [4 * num_steps, 4 * lines, 4 * lines * header.k]
    if header.num_ranked:
        sizes += [4 * lines * header.num_ranked, 2 * lines * header.num_ranked]
    try:
        raw = zlib.decompress(payload)
    except zlib.error as error:
        raise ValueError(f"the trace {path} is damaged: a block cannot be decompressed ({error})") from error
    if len(raw) != sum(sizes):
        raise ValueError(
            f"the trace {path} has a block of {len(raw)} bytes where {num_steps} steps of {len(header.layers)} layers "
            f"with k = {header.k} take {sum(sizes)}: its header and its blocks do not belong together"
        )
    ends = np.cumsum(sizes)
    parts = [raw[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    counts = np.frombuffer(parts[1], "<u4").reshape(*shape, 1)
    if (counts > header.k).any():
        raise ValueError(f"the trace {path} has 'counts' of {counts.max()} positions where k = {header.k}")
    gaps = _unplane(parts[2], np.uint32, (*shape, header.k))
    selection = _positions("selection", gaps.cumsum(axis=-1, dtype=np.uint64), np.arange(header.k) >= counts, path)
    newest = np.frombuffer(parts[0], "<i4").astype(np.int32)
    if not header.num_ranked:
        return Steps(newest, selection)
    best = _unplane(parts[3], np.uint32, (*shape, header.num_ranked))
    ranked = _positions("ranked", best, best == PAD, path)
    return Steps(newest, selection, ranked, _unplane(parts[4], np.float16, (*shape, header.num_ranked)))


def _positions(
    field: str, stored: NDArray[np.unsignedinteger], pads: NDArray[np.bool_], path: Path
) -> NDArray[np.int32]:
    """Stored numbers as positions, -1 at pads. Raises `ValueError` for what int32 cannot hold."""
    most = np.iinfo(np.int32).max
    beyond = (stored > most) & ~pads
    if beyond.any():
        raise ValueError(
            f"{field!r} of the trace {path} has a position of {stored[beyond][0]}, above {most}: "
            f"the file is damaged, or its writer's positions did not ascend"
        )
    positions = stored.astype(np.int32)
    positions[pads] = -1
    return positions


def _check_steps(header: Header, steps: Steps) -> None:
    shape = (steps.num_steps, len(header.layers))
    wanted: dict[str, tuple[NDArray[Any] | None, tuple[int, ...] | None]] = {
        "selection": (steps.selection, (*shape, header.k)),
        "ranked": (steps.ranked, (*shape, header.num_ranked) if header.num_ranked else None),
        "scores": (steps.scores, (*shape, header.num_ranked) if header.num_ranked else None),
    }
    for name, (array, expected) in wanted.items():
        came = None if array is None else array.shape
        if came != expected:
            raise ValueError(
                f"{name} of these steps must have shape {expected}, as the trace's header says, got {came}"
            )


def _gaps(selection: NDArray[np.int32]) -> NDArray[np.uint32]:
    """Differences of ascending positions; pads add nothing."""
    filled = np.maximum.accumulate(selection, axis=-1).clip(min=0)
    return np.diff(filled, axis=-1, prepend=np.int32(0)).astype(np.uint32)


def _planes(values: NDArray[Any]) -> bytes:
    """All lowest bytes, then all second ones, and so on: equal bytes lie together and compress."""
    raw = np.ascontiguousarray(values.astype(values.dtype.newbyteorder("<")))
    return raw.view(np.uint8).reshape(-1, values.dtype.itemsize).T.tobytes()


def _unplane(raw: bytes, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    """The values of `_planes`, in this machine's byte order."""
    wanted = np.dtype(dtype)
    planes = np.frombuffer(raw, np.uint8).reshape(wanted.itemsize, -1)
    values = np.ascontiguousarray(planes.T).view(wanted.newbyteorder("<"))
    return np.asarray(values, wanted).reshape(shape)
