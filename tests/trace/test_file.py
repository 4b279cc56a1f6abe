"""Trace files: what is written comes back, and a wrong file is told from a whole one."""

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hisparse.trace import open_trace
from hisparse.trace.file import TraceFile, TraceWriter, recover
from hisparse.trace.format import BLOCK, MAGIC, PREAMBLE, Header, Steps, encode_header

HEADER = Header((0, 3, 7), 5, about={"model": "a model", "selector": "Ä"})
RANKED = replace(HEADER, num_ranked=20)


def some_steps(header: Header, count: int, seed: int = 0) -> Steps:
    """Random selections with pads, positions beyond 2^24 among them."""
    rng = np.random.default_rng(seed)
    shape = (count, len(header.layers))
    selection = np.full((*shape, header.k), -1, np.int32)
    for place in np.ndindex(*shape):
        chosen = rng.integers(0, header.k + 1)
        selection[place][:chosen] = np.sort(rng.choice(2**31 - 1, chosen, replace=False))
    newest = rng.integers(0, 2**31 - 1, count, dtype=np.int32)
    if not header.num_ranked:
        return Steps(newest, selection)
    ranked = rng.permuted(np.tile(np.arange(1000), (count * shape[1], 1)), axis=1)[:, : header.num_ranked]
    ranked[:1, -3:] = -1
    scores = -np.sort(rng.random((*shape, header.num_ranked))).astype(np.float16)
    return Steps(newest, selection, ranked.reshape(*shape, header.num_ranked).astype(np.int32), scores)


def written(path: Path, header: Header, *parts: Steps) -> Path:
    with TraceWriter(path, header) as writer:
        for part in parts:
            writer.write(part)
    return path


def assert_same(found: Steps, wanted: Steps) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.dtype == other.dtype
            assert np.array_equal(one, other)


@pytest.mark.parametrize("header", [HEADER, RANKED])
def test_what_is_written_comes_back(tmp_path: Path, header: Header) -> None:
    parts = [some_steps(header, count, seed) for seed, count in enumerate((7, 1, 4))]
    path = written(tmp_path / "a.hst", header, *parts, some_steps(header, 0))
    with TraceFile(path) as file:
        assert file.header == header
        assert file.num_steps == 12
        assert_same(file.read(0, 7), parts[0])
        assert_same(file.read(7, 8), parts[1])
        middle = file.read(5, 10)
        assert np.array_equal(middle.selection[:2], parts[0].selection[5:])
        assert np.array_equal(middle.newest[3:], parts[2].newest[:2])
        for start, stop in ((0, 13), (4, 4), (-1, 3)):
            with pytest.raises(ValueError, match="has 12 steps, got the range"):
                file.read(start, stop)


def test_a_file_is_gone_on_with(tmp_path: Path) -> None:
    first, second = some_steps(RANKED, 3, 1), some_steps(RANKED, 2, 2)
    path = written(tmp_path / "a.hst", RANKED, first)
    with pytest.raises(ValueError, match="exists already"):
        TraceWriter(path, RANKED)
    with TraceWriter(path, RANKED, append=True) as writer:
        assert writer.num_steps == 3
        writer.write(second)
    with TraceFile(path) as file:
        assert_same(file.read(3), second)
    for other, name in ((replace(RANKED, k=6), "k"), (replace(RANKED, layers=(0, 1, 2)), "layers")):
        with pytest.raises(ValueError, match=rf"has {name} .*: write to another file"):
            TraceWriter(path, other, append=True)


def test_only_blocks_that_are_asked_for_are_decoded(tmp_path: Path) -> None:
    path = written(tmp_path / "a.hst", HEADER, some_steps(HEADER, 4), some_steps(HEADER, 4))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with TraceFile(path) as file:
        assert file.read(0, 4).num_steps == 4
        with pytest.raises(ValueError, match=r"damaged: steps 4 to 7 do not match their checksum"):
            file.read(3, 5)


def test_every_cut_is_noticed(tmp_path: Path) -> None:
    path = written(tmp_path / "a.hst", HEADER, some_steps(HEADER, 2), some_steps(HEADER, 3))
    whole = path.read_bytes()
    header = len(encode_header(HEADER))
    first = header + BLOCK.size + BLOCK.unpack(whole[header : header + BLOCK.size])[2]
    for end in range(len(MAGIC), len(whole)):
        path.write_bytes(whole[:end])
        if end in (header, first):
            assert TraceFile(path).num_steps == (0 if end == header else 2)
            continue
        with pytest.raises(ValueError, match="is truncated: " + ("2 whole steps" if end > first else "")):
            TraceFile(path)
        if end > header:
            assert recover(path) == (2 if end > first else 0)
            assert TraceFile(path).num_steps == (2 if end > first else 0)


def changed(start: int, value: bytes) -> Callable[[bytes], bytes]:
    return lambda whole: whole[:start] + value + whole[start + len(value) :]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda whole: b"", "is not a trace: it does not begin with 'HSTRACE'"),
        (lambda whole: b"PK\x03\x04" + whole, "is not a whole .npy or .npz file"),
        (changed(8, struct.pack("<I", 2)), r"has format version 2, and this hisparse reads version 1: upgrade it"),
        (changed(PREAMBLE.size + 3, b"?"), "damaged: its header does not match its checksum"),
        (lambda whole: whole + b"more bytes than a block's head", "damaged after step 6: no block begins there"),
    ],
)
def test_files_that_are_no_whole_trace(tmp_path: Path, spoil: Callable[[bytes], bytes], message: str) -> None:
    path = written(tmp_path / "a.hst", HEADER, some_steps(HEADER, 6))
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(ValueError, match=message) as caught:
        open_trace(path)
    assert str(path) in str(caught.value)


def test_files_without_steps_or_without_a_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is empty: it has a header and no steps"):
        open_trace(written(tmp_path / "a.hst", HEADER))
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        open_trace(tmp_path / "b.hst")
    with pytest.raises(ValueError, match="needs layers and a k of at least 1"):
        Header((), 5)
    with pytest.raises(ValueError, match="at least k = 5, got 4"):
        Header((0,), 5, 4)


@pytest.mark.parametrize("header", [HEADER, RANKED])
def test_steps_that_do_not_fit(tmp_path: Path, header: Header) -> None:
    steps = some_steps(header, 3)
    wrong = [steps._replace(selection=steps.selection[..., :4]), steps._replace(selection=steps.selection[:, :2])]
    wrong.append(some_steps(RANKED if header is HEADER else HEADER, 3))
    with TraceWriter(tmp_path / "a.hst", header) as writer:
        for one in wrong:
            with pytest.raises(ValueError, match="of these steps must have shape"):
                writer.write(one)
        assert writer.num_steps == 0


def test_selections_compress(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    selection = np.sort(rng.permuted(np.tile(np.arange(8000), (200, 1)), axis=1)[:, :160])[:, None].astype(np.int32)
    steps = Steps(np.arange(200, dtype=np.int32), selection)
    path = written(tmp_path / "a.hst", Header((0,), 160), steps)
    assert path.stat().st_size < 1.2 * selection.size  # bytes a position, though these are drawn at random
