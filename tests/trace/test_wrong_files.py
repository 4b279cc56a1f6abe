"""Files that hold what no request can have selected: each is refused with its name and the field's."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hisparse.trace import open_trace
from hisparse.trace.file import TraceWriter
from hisparse.trace.format import BLOCK, MAGIC, PREAMBLE, TAG, VERSION, Header, Steps
from hisparse.trace.report import make_report, read_report
from hisparse.trace.sweep import Sweep
from hisparse.trace.trace import MOST_POSITIONS
from tests.trace.traces import drifting

WHOLE: dict[str, Any] = {"layers": [0, 3], "k": 2, "num_ranked": 0, "about": {}}


def refused(path: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        open_trace(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def raw_header(**changes: Any) -> bytes:
    text = json.dumps(WHOLE | changes).encode()
    return PREAMBLE.pack(MAGIC, VERSION, len(text), zlib.crc32(text)) + text


def raw_block(newest: int, counts: list[int], gaps: list[int], ranked: tuple[int, ...] = ()) -> bytes:
    """One step of a layer; numbers as stored."""
    planes = [np.array(numbers, "<u4").view(np.uint8).reshape(-1, 4).T.tobytes() for numbers in (gaps, ranked)]
    parts = (np.array([newest], "<i4").tobytes(), np.array(counts, "<u4").tobytes(), *planes, bytes(2 * len(ranked)))
    payload = zlib.compress(b"".join(parts))
    return BLOCK.pack(TAG, 1, len(payload), zlib.crc32(payload)) + payload


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"about": 5}, "'about' of a trace must be an object, got 5"),
        ({"about": None}, "'about' of a trace must be an object, got None"),
        ({"about": [1]}, r"'about' of a trace must be an object, got \[1\]"),
        ({"about": {"record_bytes": True}}, "'record_bytes' of the trace .* from 1 on, got True"),
        ({"about": {"record_bytes": "1152"}}, "'record_bytes' of the trace .* from 1 on, got '1152'"),
        ({"k": 2.0}, r"a k of at least 1, got 2 layers, k 2\.0"),
        ({"num_ranked": 4.0}, r"at least k = 2, got 4\.0"),
        ({"layers": [1, 1]}, r"distinct whole numbers from 0 on, got \[1, 1\]"),
        ({"layers": [0, -1]}, r"distinct whole numbers from 0 on, got \[0, -1\]"),
        ({"layers": [0, 1.5]}, r"distinct whole numbers from 0 on, got \[0, 1.5\]"),
        ({"layers": [0, {}]}, r"distinct whole numbers from 0 on, got \[0, \{\}\]"),
        ({"layers": "abcd"}, "'layers' must be a list, got 'abcd'"),
        ({"layers": 2}, "'layers' must be a list, got 2"),
    ],
)
def test_headers_of_our_own(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "a.hst"
    path.write_bytes(raw_header(**changes) + raw_block(9, [2, 2], [1, 2, 3, 4]))
    refused(path, message)


def test_headers_that_lack_a_name(tmp_path: Path) -> None:
    path = tmp_path / "a.hst"
    for text, missing in ((b'{"k": 2, "about": {}}', "layers, num_ranked"), (b"[]", "layers, k, num_ranked, about")):
        path.write_bytes(PREAMBLE.pack(MAGIC, VERSION, len(text), zlib.crc32(text)) + text)
        refused(path, f"has a header that names no {missing}$")


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (raw_block(9, [3], [1, 2]), "'counts' of 3 positions where k = 2"),
        (raw_block(9, [2], [1, 2**31 - 1]), "'selection' .* has a position of 2147483648, above 2147483647"),
        (raw_block(9, [2], [5, 2**32 - 3]), "'selection' .* has a position of 4294967298"),
        (raw_block(9, [2], [5, 5]), "'selection' .* the newest, 9 at most, got a later 10 in step 0, layer 0"),
        (raw_block(9, [2], [5, 0]), "'selection' .* a repeated 5 in step 0, layer 0"),
        (raw_block(-1, [0], [0, 0]), "'newest' .* must ascend, .* got -1 in step 0"),
        (raw_block(MOST_POSITIONS, [0], [0, 0]), "'newest' .* at most 16777215, got 16777216 in step 0"),
    ],
)
def test_steps_of_our_own(tmp_path: Path, block: bytes, message: str) -> None:
    path = tmp_path / "a.hst"
    path.write_bytes(raw_header(layers=[0]) + block)
    refused(path, message)


@pytest.mark.parametrize(
    ("ranked", "message"),
    [
        ((1, 3, 2**31, 2), "'ranked' .* has a position of 2147483648"),
        ((1, 3, 10, 2), "'ranked' .* got a later 10"),
        ((1, 3, 3, 2), "'ranked' .* got a repeated 3"),
        ((1, 2, 5, 2**32 - 1), "'ranked' .* must hold what the step selects, and holds 1 of 2 positions"),
    ],
)
def test_ranks_of_our_own(tmp_path: Path, ranked: tuple[int, ...], message: str) -> None:
    path = tmp_path / "a.hst"
    path.write_bytes(raw_header(layers=[0], num_ranked=4) + raw_block(9, [2], [1, 2], ranked))
    refused(path, message)


def test_scores_of_our_own(tmp_path: Path) -> None:
    ranked = np.array([[[1, 3, 4, 5]]], np.int32)
    for number, (scores, selected, message) in enumerate(
        [
            ([4, 3, 2, 1], [1, 3], None),
            ([np.inf, 2, 2, 2], [1, 7], None),  # 7 tied with the others
            ([4, 3, 2, 1], [1, 7], "'ranked' .* must hold what the step selects"),
            ([4, np.nan, 2, 1], [1, 3], "'scores' .* must descend in every line, got nan in step 0, line 0, rank 1"),
            ([4, 3, 2, 3], [1, 3], "'scores' .* must descend in every line, got an ascent in step 0, line 0, rank 3"),
        ]
    ):
        path = tmp_path / f"{number}.hst"
        with TraceWriter(path, Header((0,), 2, 4)) as writer:
            selection = np.array([[selected]], np.int32)
            writer.write(Steps(np.array([9], np.int32), selection, ranked, np.array([[scores]], np.float16)))
        if message is None:
            assert open_trace(path).selection.tolist() == [[selected]]
        else:
            refused(path, message)


def test_another_recording_appended(tmp_path: Path) -> None:
    path = tmp_path / "a.hst"
    path.write_bytes(raw_header(layers=[0]) + raw_block(8, [1], [1, 0]) + raw_block(9, [1], [1, 0]))
    assert open_trace(path).newest.tolist() == [8, 9]
    path.write_bytes(path.read_bytes() + raw_block(9, [1], [1, 0]))
    refused(path, "'newest' .* got 9 in step 2 after 9: a file holds the steps of one request")


def arrays(**changes: Any) -> dict[str, Any]:
    """A ranked trace of two steps, two layers and four ranks; `meta` is a mapping here."""
    ranked = np.tile(np.arange(4, dtype=np.int64), (2, 2, 1))
    score = np.tile(np.arange(4, 0, -1, dtype=np.float16), (2, 2, 1))
    given = {"pos": ranked, "score": score, "layers": np.array([3, 5]), "meta": {"k": 2, "ctx": 50}} | changes
    return given | {"meta": np.array(json.dumps(given["meta"]))}


def changed(array: str, entry: tuple[int, ...], value: float) -> dict[str, NDArray[Any]]:
    spoilt = arrays()[array].copy()
    spoilt[entry] = value
    return {array: spoilt}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (changed("pos", (1, 0, 2), 2**32 + 1), "'pos' .* got a later 4294967297 in step 1, layer 0"),
        (changed("pos", (1, 0, 2), 52), "'pos' .* the newest, 51 at most, got a later 52 in step 1, layer 0"),
        (changed("pos", (1, 0, 2), 1), "'pos' .* got a repeated 1 in step 1, layer 0"),
        (
            changed("score", (0, 1, 3), 9),
            "'score' .* must descend in every line, got an ascent in step 0, line 1, rank 3",
        ),
        (changed("score", (0, 1, 3), np.nan), "'score' .* got nan in step 0, line 1, rank 3"),
        ({"score": np.ones((2, 2, 3))}, r"'score' .* the shape of 'pos', \[2, 2, 4\], got float64 \[2, 2, 3\]"),
        ({"score": np.full((2, 2, 4), "x")}, r"'score' .* must be numbers of the shape of 'pos'"),
        ({"layers": np.array([[3, 5]])}, r"'layers' .* distinct whole numbers from 0 on, .* got int64 \[1, 2\]"),
        ({"layers": np.array(["a", "b"])}, "'layers' .* distinct whole numbers from 0 on, .* got <U1"),
        ({"layers": np.array([3, 3])}, "'layers' .* distinct whole numbers"),
        ({"layers": np.array([3, -1])}, "'layers' .* distinct whole numbers"),
        ({"layers": np.array([3, 4.5])}, "'layers' .* distinct whole numbers"),
        ({"meta": {"ctx": 99999999999}}, "'ctx' in 'meta' .* from 0 to 16777214, got 99999999999"),
        ({"meta": {"ctx": -1}}, "'ctx' in 'meta' .* got -1"),
        ({"meta": {"ctx": "50"}}, "'ctx' in 'meta' .* got '50'"),
        ({"meta": {"ctx": 50, "page": 10**9}}, "'page' in 'meta' .* from 1 to 1024, got 1000000000"),
        ({"meta": {"ctx": 50, "page": True}}, "'page' in 'meta' .* got True"),
        ({"meta": {"record_bytes": 0}}, "'record_bytes' .* got 0"),
    ],
)
def test_ranked_arrays(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays(**changes))
    refused(tmp_path / "a.npz", message)


def test_positions_of_generated_arrays(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([[[1, 2**31 - 5]]], np.int32))
    refused(tmp_path / "a.npy", "16777215 at most, got a later 2147483643 in step 0, request 0")
    delta = np.ones((1, 1, 1, 3), np.uint16)
    np.savez(tmp_path / "b.npz", delta=delta, meta=np.array('{"ctx": 2}'))
    refused(tmp_path / "b.npz", "'delta' .* the newest, 2 at most, got a later 3 in step 0, layer 0")


def test_the_content_tells_what_a_file_is(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **arrays())
    whole = raw_header(layers=[0]) + raw_block(9, [2], [1, 2])
    for suffix in ("trace", "hst", "npy", "json"):
        path = tmp_path / f"b.{suffix}"
        path.write_bytes((tmp_path / "a.npz").read_bytes())
        assert open_trace(path).lines == (3, 5)
        path.write_bytes(whole)
        assert open_trace(path).selection.tolist() == [[[1, 3]]]
        path.write_text(' {"trace": 1}')
        refused(path, "is no trace but JSON: a report is drawn with `hisparse trace plot`")


def set_result(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda report: report["results"][1].update(changes)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda report: report.update(results=[]), r"one or more results as 'results', got \[\]"),
        (lambda report: report["results"].append({}), r"must have a name as 'results\[2\].policy', got nothing"),
        (lambda report: report["results"].append(5), r"must have an object as 'results\[2\]', got 5"),
        (lambda report: report.update(k=0), "whole number from 1 on as 'k', got 0"),
        (lambda report: report.update(overlap=5), "an object as 'overlap', got 5"),
        (lambda report: report["overlap"].pop("histogram"), "20 counts as 'overlap.histogram', got nothing"),
        (lambda report: report.update(skip="a"), "a whole number below 'steps' as 'skip', got 'a'"),
        (lambda report: report.update(line_numbers=[0, 1]), r"3 whole numbers as 'line_numbers', got \[0, 1\]"),
        (lambda report: report.update(line_name="../x"), "'layer' or 'request' as 'line_name'"),
        (lambda report: report.update(about=None), "an object as 'about', got None"),
        (lambda report: report.update(reuse=[]), "9 bars as 'reuse'"),
        (lambda report: report["reuse"][2].update(count=-1), r"a count as 'reuse\[2\].count', got -1"),
        (lambda report: report.pop("first_uses"), "a count as 'first_uses', got nothing"),
        (set_result(miss_rate=None), r"a share as 'results\[1\].miss_rate', got None"),
        (set_result(miss_rate=float("nan")), r"a share as 'results\[1\].miss_rate', got nan"),
        (set_result(size="12"), r"'results\[1\].size', got '12'"),
        (
            set_result(miss_rate_by_step=[0.5]),
            r"12 shares, one a step as 'results\[1\].miss_rate_by_step', got \[0.5\]",
        ),
        (set_result(miss_rate_by_layer=[0.5]), r"3 shares, one a line as 'results\[1\].miss_rate_by_layer'"),
    ],
)
def test_reports(tmp_path: Path, spoil: Callable[[dict[str, Any]], None], message: str) -> None:
    report = json.loads(json.dumps(make_report(drifting(steps=12), Sweep(("lru",), (12, 24)), workers=1)))
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    assert read_report(path) == report
    spoil(report)
    path.write_text(json.dumps(report))
    with pytest.raises(ValueError, match=message) as caught:
        read_report(path)
    assert str(path) in str(caught.value)
