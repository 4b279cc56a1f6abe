"""Selection traces in files.

Three kinds: a .npy of int32 [steps, batch, k]; an .npz that has such an array as `selection` or `trace`; and an
.npz recorded from a model, which has `delta`, uint16 [steps, layers, bands, k]: the selection is band 0,
ascending by position and stored as differences.
"""

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

WANTED = "int32 [steps, batch, k]"
NAMES = ("selection", "trace")
RECORDED = "delta"


def read_trace(path: Path, layers: tuple[int, ...] = ()) -> NDArray[np.int32]:
    """A file's selections, int32 [steps, layers, batch, k]; layers is 1 unless several are asked for.

    Args:
        path: .npy or .npz.
        layers: of a recorded trace; batch is 1 then.

    Raises:
        ValueError: what was expected of the file, and what came.
    """
    found = _select(path, _load(path), layers)
    _check_positions(path, found)
    return found


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


def _select(
    path: Path, loaded: NDArray[Any] | Mapping[str, NDArray[Any]], layers: tuple[int, ...]
) -> NDArray[np.int32]:
    if isinstance(loaded, np.ndarray):
        return _plain(path, loaded, layers)
    if RECORDED in loaded:
        return _recorded(path, loaded[RECORDED], layers)
    for name in NAMES:
        if name in loaded:
            return _plain(path, loaded[name], layers)
    raise ValueError(
        f"the trace {path} must have an array 'selection' or 'trace', {WANTED}, or 'delta' of a recorded trace; "
        f"it has {', '.join(sorted(loaded)) or 'none'}"
    )


def _plain(path: Path, array: NDArray[Any], layers: tuple[int, ...]) -> NDArray[np.int32]:
    if array.dtype != np.int32 or array.ndim != 3 or 0 in array.shape:
        raise ValueError(f"the trace {path} must be {WANTED}, none empty, got {array.dtype} {list(array.shape)}")
    if layers:
        raise ValueError(f"--trace-layer is for a recorded trace (an .npz with 'delta'), and {path} has no layers")
    return array[:, None]


def _recorded(path: Path, delta: NDArray[Any], layers: tuple[int, ...]) -> NDArray[np.int32]:
    if delta.dtype != np.uint16 or delta.ndim != 4 or 0 in delta.shape:
        raise ValueError(
            f"'delta' of the trace {path} must be uint16 [steps, layers, bands, k], none empty, "
            f"got {delta.dtype} {list(delta.shape)}"
        )
    last = delta.shape[1] - 1
    if not layers or not all(0 <= layer <= last for layer in layers):
        came = ", ".join(map(str, layers)) or "none"
        raise ValueError(f"the trace {path} has layers 0 to {last}: choose with --trace-layer, got {came}")
    positions = delta[:, list(layers), 0].astype(np.int64).cumsum(axis=-1)  # [steps, layers, k]
    return positions[:, :, None].astype(np.int32)


def _check_positions(path: Path, found: NDArray[np.int32]) -> None:
    """Positions are not negative and distinct in a line; the first that is not is named."""
    ascending = np.sort(found, axis=-1)
    for what, wrong in (("a negative", found < 0), ("a repeated", ascending[..., 1:] == ascending[..., :-1])):
        if wrong.any():
            step, _, request, entry = (int(index) for index in np.argwhere(wrong)[0])
            value = (found if what == "a negative" else ascending)[step, _, request, entry]
            raise ValueError(
                f"the trace {path} must hold distinct positions from 0 on in every line, "
                f"got {what} {value} in step {step}, request {request}"
            )
