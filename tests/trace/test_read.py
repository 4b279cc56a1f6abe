"""The one reader: every kind of file, and the k that it can be read with."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hisparse.trace import open_trace
from hisparse.trace.file import TraceWriter
from hisparse.trace.format import Header, Steps
from tests.trace.traces import CUT


def meta(**values: Any) -> NDArray[np.str_]:
    return np.array(json.dumps(values))


def test_a_recorded_trace() -> None:
    trace = open_trace(CUT)
    assert (trace.num_steps, trace.num_lines, trace.k, trace.lines) == (120, 4, 160, (3, 9, 14, 20))
    assert trace.newest[[0, 119]].tolist() == [7000, 7119]
    assert trace.runners_up is not None
    assert not set(trace.runners_up[5, 2]) & set(trace.selection[5, 2])
    both = open_trace(CUT, 320)
    assert set(both.selection[5, 2]) == {*trace.runners_up[5, 2], *trace.selection[5, 2]}
    assert both.runners_up is None
    assert (np.diff(both.selection) > 0).all()
    with pytest.raises(ValueError, match="can be read with k = 160, 320, got k = 100"):
        open_trace(CUT, 100)


def test_layers_by_their_numbers() -> None:
    trace = open_trace(CUT)
    part = trace.of_lines((14, 3))
    assert np.array_equal(part.selection, trace.selection[:, [2, 0]])
    assert part.runners_up is not None
    with pytest.raises(ValueError, match="has layers 3, 9, 14, 20, got 4, 5"):
        trace.of_lines((3, 4, 5))


def test_a_ranked_trace(tmp_path: Path) -> None:
    ranked = np.stack([np.random.default_rng(step).permutation(50)[:16] for step in range(6)])[:, None]
    path = tmp_path / "ranked.npz"
    scores = np.zeros(ranked.shape, np.float16)
    np.savez(path, pos=ranked.astype(np.int16), score=scores, layers=np.array([8]), meta=meta(k=[4, 8], ctx=50))
    trace = open_trace(path)
    assert (trace.k, trace.lines) == (4, (8,))
    assert trace.selection[2, 0].tolist() == sorted(ranked[2, 0, :4])
    six = open_trace(path, 6)
    assert six.runners_up is not None
    assert six.runners_up[3, 0].tolist() == sorted(ranked[3, 0, 6:12])
    assert open_trace(path, 9).runners_up is None  # 18 ranks are not there
    with pytest.raises(ValueError, match=r"k = 1, 2, 3, ... 16, got k = 17"):
        open_trace(path, 17)


def test_pages_become_positions(tmp_path: Path) -> None:
    newest = np.arange(34, 37)
    pages = np.stack([np.full(3, 34 // 8), [0, 3, 1], [2, 1, 0], [1, 2, 3]], axis=-1)[:, None]
    path = tmp_path / "pages.npz"
    np.savez(
        path, pos=pages.astype(np.int16), score=np.zeros(pages.shape, np.float16), meta=meta(page=8, k=[16], ctx=34)
    )
    trace = open_trace(path)
    assert trace.k == 16
    assert trace.selection[0, 0].tolist() == [*range(8), 32, 33, 34, *[-1] * 5]  # its newest position is 34
    assert trace.selection[1, 0].tolist() == [*range(24, 36), *[-1] * 4]
    assert trace.newest.tolist() == newest.tolist()
    with pytest.raises(ValueError, match=r"k = 8, 16, 24, ... 32, got k = 12"):
        open_trace(path, 12)


def own_file(path: Path) -> tuple[Path, Steps]:
    rng = np.random.default_rng(3)
    ranked = np.stack([rng.permutation(60)[:16] for _ in range(10)]).reshape(5, 2, 16).astype(np.int32)
    selection = np.sort(ranked[..., :4]).astype(np.int32)
    selection[1, 1] = [*np.sort(ranked[1, 1, 5:7]), -1, -1]  # a selector that does not take the best, nor all
    steps = Steps(np.arange(60, 65, dtype=np.int32), selection, ranked, np.zeros(ranked.shape, np.float16))
    with TraceWriter(path, Header((0, 1), 4, 16, {"model": "m"})) as writer:
        writer.write(steps)
    return path, steps


def test_a_file_of_our_own(tmp_path: Path) -> None:
    path, steps = own_file(tmp_path / "trace.hst")
    assert steps.ranked is not None
    trace = open_trace(path)
    assert np.array_equal(trace.selection, steps.selection)
    assert dict(trace.about) == {"model": "m"}
    assert trace.runners_up is not None
    assert trace.runners_up[0, 0].tolist() == sorted(steps.ranked[0, 0, 4:8])
    rest = [position for position in steps.ranked[1, 1] if position not in steps.selection[1, 1]]
    assert trace.runners_up[1, 1].tolist() == sorted(rest[:4])
    larger = open_trace(path, 6)
    assert larger.selection[1, 1].tolist() == sorted(steps.ranked[1, 1, :6])
    assert larger.runners_up is not None
    assert open_trace(path, 10).runners_up is None
    with pytest.raises(ValueError, match="got k = 17: change --k or leave it out"):
        open_trace(path, 17)


def test_no_scores_no_other_k(tmp_path: Path) -> None:
    path = tmp_path / "a.hst"
    with TraceWriter(path, Header((0,), 2)) as writer:
        writer.write(Steps(np.array([5], np.int32), np.array([[[1, 4]]], np.int32)))
    assert open_trace(path, 2).runners_up is None
    with pytest.raises(ValueError, match="can be read with k = 2, got k = 1"):
        open_trace(path, 1)


def test_selections_that_repeat(tmp_path: Path) -> None:
    path = tmp_path / "a.hst"
    with TraceWriter(path, Header((0,), 3)) as writer:
        writer.write(Steps(np.array([5], np.int32), np.array([[[1, 4, 4]]], np.int32)))
    with pytest.raises(ValueError, match=r"distinct positions .* got a repeated 4 in step 0, layer 0"):
        open_trace(path)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"delta": np.ones((2, 1, 2, 3), np.uint16), "meta": np.array("[1]")}, "must be a JSON object, got list"),
        ({"delta": np.ones((2, 1, 2, 3), np.uint16), "meta": np.array("{")}, "must be a JSON object: Expecting"),
        ({"delta": np.ones((2, 1, 2, 3), np.uint16), "layers": np.arange(2)}, "of 1 layers, and 'layers' names 2"),
        ({"delta": np.zeros((2, 1, 2, 3), np.uint16)}, "a repeated 0 in step 0, layer 0"),
        (
            {"pos": np.ones((2, 3)), "score": np.ones(1), "meta": meta()},
            r"\[steps, layers, ranks\], none empty, got fl",
        ),
    ],
)
def test_recorded_arrays_that_are_wrong(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        open_trace(tmp_path / "a.npz")
