"""Tiles: every row once, in order, from two fixed buffers."""

import pytest
import torch
from torch import Tensor

from hisparse.layout import TILE_RECORDS
from hisparse.workspace import Source, Workspace
from tests.caches import GARBAGE, small_layout

HOST = torch.arange(3000 * 8, dtype=torch.int32).view(3000, 8).view(torch.uint8)


def fetch(rows: Tensor, out: Tensor) -> None:
    out.copy_(HOST[rows])


def source(rows: Tensor, name: str = "it") -> Source:
    return Source(name, fetch, rows)


def new_workspace() -> Workspace:
    workspace = Workspace(small_layout(), torch.device("cpu"))
    workspace._tiles.fill_(GARBAGE)
    return workspace


@pytest.mark.parametrize("count", [1, 1023, 1024, 1025, 2048, 2500])
def test_rows_in_order_whatever_their_number(count: int) -> None:
    rows = torch.randperm(3000, generator=torch.Generator().manual_seed(count))[:count]
    tiles = [tile.clone() for tile in new_workspace().read(source(rows))]
    assert [len(tile) for tile in tiles] == [TILE_RECORDS] * (count // 1024) + [count % 1024] * (count % 1024 > 0)
    assert torch.equal(torch.cat(tiles), HOST[rows])


def test_two_tiles_take_turns() -> None:
    reading = new_workspace().read(source(torch.arange(3000)))
    first, second, third = reading
    assert first.data_ptr() != second.data_ptr()
    assert third.data_ptr() == first.data_ptr()
    assert torch.equal(third, HOST[2048:])


def test_a_short_tile_after_a_long_one_shows_nothing_old() -> None:
    workspace = new_workspace()
    list(workspace.read(source(torch.arange(2000))))
    (tile,) = workspace.read(source(torch.tensor([7])))
    assert torch.equal(tile, HOST[7:8])


def test_no_rows() -> None:
    assert sum(len(tile) for tile in new_workspace().read(source(torch.arange(0)))) == 0


class Layers:
    """Sources of as many layers, the numbers of their records a layer apart; counts what is fetched."""

    def __init__(self, count: int) -> None:
        self.rows = torch.arange(count)
        self.fetched: list[tuple[int, int]] = []  # layer, rows

    def source(self, layer: int) -> Source:
        def fetch_of_layer(rows: Tensor, out: Tensor) -> None:
            self.fetched.append((layer, len(rows)))
            out.copy_(HOST[rows] + layer)

        return Source(layer, fetch_of_layer, self.rows)

    def check(self, layer: int, tiles: list[Tensor]) -> None:
        assert torch.equal(torch.cat(tiles), HOST[self.rows] + layer)


@pytest.mark.parametrize("count", [1, 1024, 1025, 2500])
def test_the_first_tile_of_what_follows_is_filled_meanwhile(count: int) -> None:
    workspace, layers = new_workspace(), Layers(count)
    num_tiles = -(-count // TILE_RECORDS)
    for layer in range(4):
        following = layers.source(layer + 1) if layer < 3 else None
        tiles = [tile.clone() for tile in workspace.read(layers.source(layer), following)]
        layers.check(layer, tiles)
        assert len(layers.fetched) == (layer + 1) * num_tiles + (layer < 3)
    assert sorted(layers.fetched, key=lambda filled: filled[0]) == layers.fetched


def test_what_follows_may_not_come() -> None:
    workspace, layers = new_workspace(), Layers(1500)
    list(workspace.read(layers.source(0), layers.source(1)))
    layers.check(2, [tile.clone() for tile in workspace.read(layers.source(2), layers.source(3))])
    layers.check(1, [tile.clone() for tile in workspace.read(layers.source(1))])
    assert list(workspace.read(Source("nothing", fetch, torch.arange(0)), layers.source(1))) == []
    layers.check(1, [tile.clone() for tile in workspace.read(layers.source(1))])


def test_what_follows_is_not_taken_for_what_could_not_be_read() -> None:
    def failing(rows: Tensor, out: Tensor) -> None:
        out.fill_(GARBAGE)
        raise OSError

    workspace, layers = new_workspace(), Layers(1500)
    list(workspace.read(layers.source(0), layers.source(1)))
    with pytest.raises(OSError):  # noqa: PT011
        list(workspace.read(Source(7, failing, layers.rows)))
    layers.check(1, [tile.clone() for tile in workspace.read(layers.source(1))])


def test_a_reader_may_leave_in_the_middle() -> None:
    workspace, layers = new_workspace(), Layers(1500)
    for _ in range(3):
        next(workspace.read(layers.source(0), layers.source(1)))
    layers.check(1, [tile.clone() for tile in workspace.read(layers.source(1))])


@pytest.mark.gpu
@pytest.mark.parametrize("count", [0, 1, 1024, 1025, 3000])
def test_tiles_are_filled_while_others_are_read(count: int) -> None:
    """Slow readers: a tile that is overwritten too early shows."""
    host, rows = HOST.cuda(), torch.randperm(3000)[:count].cuda()

    def source_there(layer: int) -> Source:
        def fetch_there(chunk: Tensor, out: Tensor) -> None:
            out.copy_(host[chunk] + layer)

        return Source(layer, fetch_there, rows)

    workspace = Workspace(small_layout(), torch.device("cuda"))
    weights = torch.randn(4096, 4096, device="cuda")
    for layer in range(4):
        tiles = []
        for tile in workspace.read(source_there(layer), source_there(layer + 1) if layer < 3 else None):
            weights @ weights  # the reader comes late
            tiles.append(tile.clone())
        assert torch.equal(torch.cat(tiles) if tiles else host[rows], host[rows] + layer)
    if not count:
        return
    next(workspace.read(source_there(0), source_there(1)))  # left in the middle
    assert torch.equal(next(workspace.read(source_there(1))), host[rows[:1024]] + 1)
