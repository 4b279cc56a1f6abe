"""A step of an index group in a CUDA graph: the anchor resolves, its miss plan is replayed into the shared layers."""

import pytest
import torch

from hisparse.device_pool import Counters, SlotTables
from hisparse.kernels import ops
from hisparse.kernels.side_stream import SideStream
from hisparse.kernels.state import LaunchState, new_miss_plan
from tests.kernels.test_ops_gpu import make_twins

pytestmark = pytest.mark.gpu

BATCH, K, LAYERS = 4, 64, 3  # layer 0 is the anchor
START = 300  # positions in each history at first


class IndexGroup:
    """The graph and its static inputs."""

    def __init__(self) -> None:
        self.twins = make_twins(requests=BATCH, k=K, slack=1, layers=LAYERS, record_bytes=1152, with_reference=False)
        self.selection = torch.full((BATCH, K), -1, dtype=torch.int32, device="cuda")
        self.lines = torch.full((BATCH,), -1, device="cuda")
        self.rows = torch.full((BATCH,), -1, device="cuda")
        self.records = torch.zeros(LAYERS, BATCH, 1152, dtype=torch.uint8, device="cuda")
        self.slots = torch.empty(BATCH, K, dtype=torch.int32, device="cuda")
        self.table = self.twins.page_table.cuda()
        self.plan = new_miss_plan(BATCH * K, self.twins.gpu)
        self.writer, self.fetcher, self.orderer = (SideStream(self.twins.gpu) for _ in range(3))
        self.step()  # loads the kernels
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step()

    def step(self) -> None:
        twins = self.twins
        tables = SlotTables(*(table[:1] for table in twins.pool.tables))  # the anchor's are the group's
        counters = Counters(*(counter[:1] for counter in twins.pool.counters))
        state = LaunchState(twins.state.control[:1], twins.state.bins[:1], twins.state.heat)
        new_slots = ops.insert(tables, counters, state, self.rows, by_recency=True)
        with self.writer.fork("write-through"):
            for layer in range(LAYERS):
                ops.write_through(
                    self.records[layer], new_slots[0], self.rows, twins.pool.records[layer], twins.host[layer]
                )
        ops.resolve(
            tables, counters, state, 0, self.selection, self.lines, self.table, twins.host[0], twins.pool.records[0],
            by_recency=True, slots=self.slots, plan=self.plan,
        )  # fmt: skip
        with self.orderer.fork("order"):
            ops.rebuild_order(tables, counters, state, policy="lru", first_layer=0, num_layers=1)
        for layer in range(1, LAYERS):
            with self.fetcher.fork(layer):
                ops.replay(self.plan, twins.host[layer], twins.pool.records[layer])
        for side in (self.writer, self.fetcher, self.orderer):
            side.join_all()


def test_shared_layers_hold_their_records_at_the_anchors_slots() -> None:
    group = IndexGroup()
    twins, random = group.twins, torch.Generator().manual_seed(0)
    length = [START] * BATCH
    kept = torch.stack([torch.randperm(START, generator=random)[:K] for _ in range(BATCH)])
    for _ in range(40):
        live = torch.rand(BATCH, generator=random) < 0.8
        lines = torch.where(live, torch.arange(BATCH), -1)
        new_rows = torch.stack([twins.rows(i, torch.tensor([length[i]]))[0] for i in range(BATCH)])
        new_rows[~live] = -1
        for line in range(BATCH):  # a sixth of the selection moves, and the newest position is among it
            moved = torch.randperm(length[line], generator=random)
            moved = moved[~torch.isin(moved, kept[line])][: K // 6]
            kept[line, torch.randperm(K, generator=random)[: K // 6]] = moved
            kept[line, 0] = length[line]
        group.selection.copy_(kept)
        group.lines.copy_(lines)
        group.rows.copy_(new_rows)
        group.records.random_(0, 256)
        group.graph.replay()
        real = new_rows >= 0
        twins.truth[:, new_rows[real].cuda()] = group.records[:, real.cuda()]
        wanted = torch.stack([twins.rows(line, kept[line]) for line in range(BATCH)])
        wanted[~live] = -1
        for layer in range(LAYERS):
            twins.check_slots(layer, wanted, group.slots)
        length = [one + int(is_live) for one, is_live in zip(length, live, strict=True)]
    assert int(twins.pool.counters.misses[0]) > 40 * K // 6
    twins.check()
