"""Tiles: every row once, in order, from two fixed buffers."""

import pytest
import torch
from torch import Tensor

from hisparse.layout import TILE_RECORDS
from hisparse.workspace import Workspace
from tests.caches import GARBAGE, small_layout

HOST = torch.arange(3000 * 8, dtype=torch.int32).view(3000, 8).view(torch.uint8)


def fetch(rows: Tensor, out: Tensor) -> None:
    out.copy_(HOST[rows])


def new_workspace() -> Workspace:
    workspace = Workspace(small_layout(), torch.device("cpu"))
    workspace._tiles.fill_(GARBAGE)
    return workspace


@pytest.mark.parametrize("count", [1, 1023, 1024, 1025, 2048, 2500])
def test_rows_in_order_whatever_their_number(count: int) -> None:
    rows = torch.randperm(3000, generator=torch.Generator().manual_seed(count))[:count]
    tiles = [tile.clone() for tile in new_workspace().read(fetch, rows)]
    assert [len(tile) for tile in tiles] == [TILE_RECORDS] * (count // 1024) + [count % 1024] * (count % 1024 > 0)
    assert torch.equal(torch.cat(tiles), HOST[rows])


def test_two_tiles_take_turns_and_a_tile_lives_until_the_next_but_one() -> None:
    reading = new_workspace().read(fetch, torch.arange(3000))
    first = next(reading)
    kept = first.clone()
    second = next(reading)
    assert first.data_ptr() != second.data_ptr()
    assert torch.equal(first, kept)
    third = next(reading)
    assert third.data_ptr() == first.data_ptr()
    assert torch.equal(third, HOST[2048:])


def test_a_short_tile_after_a_long_one_shows_nothing_old() -> None:
    workspace = new_workspace()
    list(workspace.read(fetch, torch.arange(2000)))
    (tile,) = workspace.read(fetch, torch.tensor([7]))
    assert torch.equal(tile, HOST[7:8])


def test_no_rows() -> None:
    assert sum(len(tile) for tile in new_workspace().read(fetch, torch.arange(0))) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("count", [0, 1, 1024, 1025, 3000])
def test_tiles_are_filled_while_others_are_read(count: int) -> None:
    """Slow readers: a tile that is overwritten too early shows."""
    host, rows = HOST.cuda(), torch.randperm(3000)[:count].cuda()

    def fetch_there(chunk: Tensor, out: Tensor) -> None:
        out.copy_(host[chunk])

    workspace = Workspace(small_layout(), torch.device("cuda"))
    weights = torch.randn(4096, 4096, device="cuda")
    for _ in range(3):
        tiles = []
        for tile in workspace.read(fetch_there, rows):
            weights @ weights  # the reader comes late
            tiles.append(tile.clone())
        assert torch.equal(torch.cat(tiles) if tiles else host[rows], host[rows])
    if not count:
        return
    next(workspace.read(fetch_there, rows))  # left in the middle
    assert torch.equal(next(workspace.read(fetch_there, rows)), host[rows[:1024]])
