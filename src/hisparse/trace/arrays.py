"""Traces in NumPy files: .npy and .npz, made by a generator or recorded from a model elsewhere.

Three kinds: int32 [steps, batch, k] selections of several requests, as a .npy or as `selection` or `trace` of an .npz;
`delta`, uint16 [steps, layers, bands, k], whose band 0 is the selection and band 1 the ranks after it, each ascending
and stored as differences; and `pos` with `score`, [steps, layers, ranks], best first, of positions or of pages.
"""

import json
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hisparse.trace.trace import (
    MOST_POSITIONS,
    Positions,
    Trace,
    ascending,
    check_distinct,
    check_positions,
    check_scores,
    is_whole,
)

WANTED = "int32 [steps, batch, k]"
PLAIN = ("selection", "trace")
RECORDED = "delta"
RANKED = ("pos", "score", "meta")
MOST_PAGE = 1024  # positions

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class _About:
    """What a recorded trace says of itself. Its methods raise `ValueError` for numbers that cannot be."""

    path: Path
    meta: Mapping[str, Any]

    def page(self, ranked: NDArray[Any]) -> int:
        """Positions in one entry of a ranked trace: Quest's page, if every step ranks its newest page first."""
        page, newest = self._number("page", 1, MOST_PAGE), self.newest(len(ranked))
        if page is None or (newest < 0).any():
            return 1
        return page if (ranked[:, :, 0] == newest[:, None] // page).all() else 1

    def newest(self, num_steps: int) -> Positions:
        """[steps]: the position that each step produces, -1 where the trace does not say."""
        start = self._number("ctx", 0, MOST_POSITIONS - num_steps)
        if start is None:
            return np.full(num_steps, -1, np.int32)
        return np.arange(start, start + num_steps, dtype=np.int32)

    def _number(self, name: str, least: int, most: int) -> int | None:
        """A number of `meta`; None: it has none of this name."""
        value = self.meta.get(name)
        if name in self.meta and not is_whole(value, least, most):
            raise ValueError(
                f"{name!r} in 'meta' of the trace {self.path} must be a whole number from {least} to {most}, "
                f"got {value!r}"
            )
        return value


def read_arrays(path: Path, k: int | None = None) -> Trace:
    """A trace of a .npy or .npz file.

    Args:
        path: of one of the three kinds.
        k: positions of a selection to take; default: what the trace was recorded with.

    Raises:
        ValueError: what was expected of the file, and what came; or a k that it does not have.
    """
    loaded = _load(path)
    if not isinstance(loaded, dict):
        return _plain(path, loaded, k)
    if RECORDED in loaded:
        return _recorded(path, loaded, k)
    for name in PLAIN:
        if name in loaded:
            return _plain(path, loaded[name], k)
    if all(name in loaded for name in RANKED):
        return _ranked(path, loaded, k)
    raise ValueError(
        f"the trace {path} must have an array 'selection' or 'trace', {WANTED}, 'delta' of a recorded trace, or 'pos', "
        f"'score' and 'meta' of a ranked one; it has {', '.join(sorted(loaded)) or 'none'}"
    )


def _load(path: Path) -> NDArray[Any] | dict[str, NDArray[Any]]:
    """The file's array, or its arrays by name."""
    try:
        with path.open("rb") as file:
            loaded = np.load(file, allow_pickle=False)
            return loaded if isinstance(loaded, np.ndarray) else {name: loaded[name] for name in loaded.files}
    except OSError as error:
        raise ValueError(f"the trace {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"the trace {path} is not a whole .npy or .npz file of numbers: {error}") from error


def _plain(path: Path, array: NDArray[Any], k: int | None) -> Trace:
    if array.dtype != np.int32 or array.ndim != 3 or 0 in array.shape:
        raise ValueError(f"the trace {path} must be {WANTED}, none empty, got {array.dtype} {list(array.shape)}")
    check_k(path, k, (array.shape[2],))
    newest = np.full(array.shape[0], -1, np.int32)
    check_positions(f"the trace {path}", array, newest, "request", pads=False)
    check_distinct(f"the trace {path}", array, "request")
    return Trace(path.stem, np.sort(array, axis=-1), newest, tuple(range(array.shape[1])), "request")


def _recorded(path: Path, arrays: Arrays, k: int | None) -> Trace:
    delta = arrays[RECORDED]
    if delta.dtype != np.uint16 or delta.ndim != 4 or 0 in delta.shape:
        raise ValueError(
            f"'delta' of the trace {path} must be uint16 [steps, layers, bands, k], none empty, "
            f"got {delta.dtype} {list(delta.shape)}"
        )
    bands, width = delta.shape[2:]
    check_k(path, k, tuple(width * count for count in range(1, bands + 1)))
    positions = delta.astype(np.int32).cumsum(axis=-1, dtype=np.int32)
    about = _about(path, arrays)
    field = f"{RECORDED!r} of the trace {path}"
    check_positions(field, positions.reshape(*delta.shape[:2], -1), about.newest(len(delta)), pads=False)
    used = 1 if k is None else k // width
    selection = positions[:, :, :used].reshape(*delta.shape[:2], -1)
    rest = positions[:, :, used : 2 * used].reshape(*delta.shape[:2], -1)
    check_distinct(field, selection)
    return _of_layers(about, arrays, selection, rest)


def _ranked(path: Path, arrays: Arrays, k: int | None) -> Trace:
    ranked = arrays["pos"]
    if ranked.dtype.kind not in "iu" or ranked.ndim != 3 or 0 in ranked.shape or (ranked < 0).any():
        raise ValueError(
            f"'pos' of the trace {path} must be positions from 0 on, [steps, layers, ranks], none empty, "
            f"got {ranked.dtype} {list(ranked.shape)}"
        )
    about = _about(path, arrays)
    page = about.page(ranked)
    newest = about.newest(len(ranked))
    check_positions(f"'pos' of the trace {path}", ranked, np.where(newest < 0, -1, newest // page))
    check_distinct(f"'pos' of the trace {path}", ranked)
    _check_score(path, arrays["score"], ranked)
    most = ranked.shape[2] * page
    k = _recorded_k(about, most) if k is None else k
    check_k(path, k, tuple(range(page, most + 1, page)))
    entries = k // page
    selection = _whole_pages(ranked[:, :, :entries], page, about)
    rest = _whole_pages(ranked[:, :, entries : 2 * entries], page, about)
    return _of_layers(about, arrays, selection, rest)


def _check_score(path: Path, score: NDArray[Any], ranked: NDArray[Any]) -> None:
    if score.dtype.kind not in "fiu" or score.shape != ranked.shape:
        raise ValueError(
            f"'score' of the trace {path} must be numbers of the shape of 'pos', {list(ranked.shape)}, "
            f"got {score.dtype} {list(score.shape)}"
        )
    check_scores(f"'score' of the trace {path}", score, ranked)


def _of_layers(about: _About, arrays: Arrays, selection: NDArray[Any], rest: NDArray[Any]) -> Trace:
    """The trace; `rest` are the ranks after the selection, and count only if there are as many."""
    num_steps, num_layers, k = selection.shape
    layers = _layers(about.path, arrays, num_layers)
    runners_up = ascending(rest) if rest.shape[2] == k else None
    newest = about.newest(num_steps)
    return Trace(about.path.stem, ascending(selection), newest, layers, runners_up=runners_up, about=dict(about.meta))


def _layers(path: Path, arrays: Arrays, num_layers: int) -> tuple[int, ...]:
    """The layers' numbers; of a file that does not say: from 0 on."""
    layers = arrays.get("layers", np.arange(num_layers))
    if (
        layers.dtype.kind not in "iu"
        or layers.ndim != 1
        or (layers < 0).any()
        or len(set(layers.tolist())) < len(layers)
    ):
        raise ValueError(
            f"'layers' of the trace {path} must be distinct whole numbers from 0 on, one a layer, "
            f"got {layers.dtype} {list(layers.shape)}"
        )
    if len(layers) != num_layers:
        raise ValueError(f"the trace {path} has selections of {num_layers} layers, and 'layers' names {len(layers)}")
    return tuple(layers.tolist())


def _about(path: Path, arrays: Arrays) -> _About:
    if "meta" not in arrays:
        return _About(path, {})
    try:
        meta = json.loads(str(arrays["meta"]))
    except ValueError as error:
        raise ValueError(f"'meta' of the trace {path} must be a JSON object: {error}") from error
    if not isinstance(meta, dict):
        raise ValueError(f"'meta' of the trace {path} must be a JSON object, got {type(meta).__name__}")
    return _About(path, meta)


def _recorded_k(about: _About, most: int) -> int:
    """The k of the selections as recorded, in positions."""
    known = about.meta.get("k")
    first = known[0] if isinstance(known, list) and known else known
    return first if isinstance(first, int) and 0 < first <= most else most // 2


def _whole_pages(entries: NDArray[Any], page: int, about: _About) -> NDArray[np.int32]:
    """Entries to positions: [steps, layers, n] pages to n * page positions, those not produced yet as -1."""
    if page == 1:
        return entries.astype(np.int32)
    positions = entries.astype(np.int32)[..., None] * page + np.arange(page, dtype=np.int32)
    positions = positions.reshape(*entries.shape[:2], -1)
    newest = about.newest(entries.shape[0])[:, None, None]
    return np.where((newest >= 0) & (positions > newest), -1, positions).astype(np.int32)


def check_k(path: Path, k: int | None, possible: tuple[int, ...]) -> None:
    """Raise `ValueError` unless the trace has selections of k positions; None: as it is."""
    if k is None or k in possible:
        return
    few = ", ".join(map(str, possible[:3])) + (f", ... {possible[-1]}" if len(possible) > 3 else "")
    raise ValueError(f"the trace {path} can be read with k = {few}, got k = {k}: change --k or leave it out")
