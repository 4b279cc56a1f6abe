"""Every operation on the GPU against its reference: bytes, invariants, counts; adversarial selections."""

import pytest
import torch
from torch import Tensor

from hisparse.kernels import ops
from hisparse.kernels.state import new_miss_plan
from hisparse.layout import CacheLayout
from tests.kernels.twins import Twins, page_rows, shuffled_pages

pytestmark = pytest.mark.gpu

SHAPES = ("drift", "churn", "same", "few", "newest", "none")


def make_twins(
    *, requests: int = 4, k: int = 64, slack: int = 64, record_bytes: int = 64, pages: int = 8, policy: str = "lru",
    layers: int = 2, extra_slots: int = 0, seed: int = 0, with_reference: bool = True,
) -> Twins:  # fmt: skip
    layout = CacheLayout(
        num_layers=layers,
        record_bytes=record_bytes,
        top_k=k,
        device_buffer_size=k + slack,
        max_requests=requests,
        num_pages=requests * pages,
        max_positions=pages * 64,
        num_slots=requests * (k + slack) + extra_slots,
    )
    twins = Twins(layout, policy, seed, with_reference)
    order = shuffled_pages(layout, seed)
    for line in range(requests):
        twins.give_pages(line, order[line * pages : (line + 1) * pages])
    return twins


class Selections:
    """Selections of each request that drift, jump, repeat or are nearly empty; garbage in unused entries."""

    def __init__(self, twins: Twins, k: int, seed: int) -> None:
        self.twins, self.k = twins, k
        self.random = torch.Generator().manual_seed(seed)
        self.last: dict[tuple[int, int], Tensor] = {}

    def pick(self, shape: str, layer: int, line: int, length: int) -> Tensor:
        count = min(self.k, length)
        anew = torch.randperm(length, generator=self.random)
        last = self.last.get((layer, line), anew[:count])
        last = last[last < length]  # the line may have a new, shorter request
        if shape == "drift":
            kept = last[torch.rand(len(last), generator=self.random) < 0.85]
            chosen = torch.cat([kept, anew[~torch.isin(anew, kept)]])[:count]
        elif shape == "churn":
            chosen = anew[~torch.isin(anew, last)][:count]
        elif shape == "same":
            chosen = last
        elif shape == "few":
            chosen = anew[: min(2, self.k)]
        elif shape == "newest":
            chosen = torch.tensor([length - 1])
        else:
            chosen = anew[:0]
        self.last[layer, line] = chosen
        padded = torch.full((self.k,), -1)
        places = torch.randperm(self.k, generator=self.random)[: len(chosen)]
        padded[places] = chosen
        return padded.int()


def drive(twins: Twins, steps: int, seed: int, *, shapes: tuple[str, ...] = SHAPES, k: int | None = None) -> None:
    """Steps with padded requests, releases and staging in between."""
    k = k or twins.layout.top_k
    random = torch.Generator().manual_seed(seed)
    selections = Selections(twins, k, seed)
    lines = twins.page_table.shape[0]
    capacity = int((twins.page_table[0] >= 0).sum()) * 64
    length = [0] * lines

    def pick(options: int) -> int:
        return int(torch.randint(0, options, (), generator=random))

    for _ in range(steps):
        if pick(6) == 0:
            line = pick(lines)
            twins.release(page_rows([p for p in twins.page_table[line].tolist() if p >= 0]))
            length[line] = 0
        for line in range(lines):
            if length[line] == 0:
                length[line] = capacity // 2 + pick(capacity // 4)
                twins.stage(twins.rows(line, torch.arange(length[line])))
        live = [line if pick(5) and length[line] < capacity else -1 for line in range(lines)]
        new = [twins.rows(line, torch.tensor([length[line]]))[0] if line >= 0 else torch.tensor(-1) for line in live]
        twins.insert(torch.stack(new))
        for layer in range(twins.layout.num_layers):
            chosen = [
                selections.pick(shapes[pick(len(shapes))], layer, line, length[line] + 1)
                if line >= 0
                else torch.full((k,), 12345, dtype=torch.int32)
                for line in live
            ]
            twins.resolve(layer, torch.stack(chosen), torch.tensor(live))
        twins.rebuild()
        for line in live:
            if line >= 0:
                length[line] += 1
    twins.check()


@pytest.mark.parametrize("policy", ["lru", "fifo", "random"])
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"slack": 1},
        {"k": 33, "slack": 1, "record_bytes": 16},
        {"k": 100, "slack": 100, "record_bytes": 1152},
        {"k": 1, "slack": 1, "requests": 3},
        {"k": 256, "slack": 1, "record_bytes": 656, "pages": 16},
        {"extra_slots": 5000},
        {"record_bytes": 8192, "requests": 2, "layers": 1},
    ],
    ids=str,
)
def test_random_schedules(sizes: dict[str, int], policy: str) -> None:
    twins = make_twins(policy=policy, **sizes)  # type: ignore[arg-type]
    drive(twins, 25, seed=1)
    assert int(twins.pool.counters.failed.sum()) == 0


def test_counts_are_those_of_the_reference_while_nothing_leaves() -> None:
    twins = make_twins(extra_slots=5000)
    drive(twins, 20, seed=2)
    assert twins.cpu_pool
    assert torch.equal(twins.pool.counters.hits.cpu(), twins.cpu_pool.counters.hits)
    assert torch.equal(twins.pool.counters.misses.cpu(), twins.cpu_pool.counters.misses)


def test_misses_stay_close_to_exact_lru() -> None:
    twins = make_twins(k=200, slack=200, pages=32, requests=3)
    drive(twins, 80, seed=3, shapes=("drift", "drift", "drift", "churn"))
    assert twins.cpu_pool
    ours, exact = int(twins.pool.counters.misses.sum()), int(twins.cpu_pool.counters.misses.sum())
    assert abs(ours - exact) <= 0.02 * exact, (ours, exact)
    assert ours + int(twins.pool.counters.hits.sum()) == twins.selected


def full_step(twins: Twins, selection: Tensor, lines: Tensor, **options: object) -> Tensor:
    twins.insert(torch.full((len(lines),), -1))
    slots = twins.resolve(0, selection, lines, **options)  # type: ignore[arg-type]
    twins.rebuild()
    return slots


def test_a_row_that_several_requests_miss_is_fetched_once() -> None:
    twins = make_twins(k=128, slack=1, layers=1)
    for line in range(4):
        twins.page_table[line, :2] = twins.page_table[0, :2]  # a shared prefix of 128 positions
    selection = torch.stack([torch.randperm(128) for _ in range(4)]).int()
    lines = torch.arange(4)
    slots = full_step(twins, selection, lines)
    assert int(twins.pool.counters.misses[0]) == 128
    assert int(twins.pool.counters.hits[0]) == 0
    by_position = torch.stack([line[order.argsort()] for line, order in zip(slots.cpu(), selection, strict=True)])
    assert (by_position == by_position[0]).all()
    full_step(twins, selection, lines)
    assert int(twins.pool.counters.hits[0]) == 4 * 128
    twins.check()


def test_every_grid_gives_the_same_bytes() -> None:
    for shape in ((1, 32, 32), (1, 1024, 1024), (7, 64, 64), (7, 64, 32), (16, 128, 96), (1000, 32, 32)):
        twins = make_twins(k=96, slack=1, layers=1, record_bytes=1152)
        for seed in range(4):
            selection = torch.stack(
                [torch.randperm(500, generator=torch.Generator().manual_seed(seed + 9 * i))[:96] for i in range(4)]
            )
            full_step(twins, selection.int(), torch.arange(4), shape=shape)
        twins.check()


def test_selections_that_do_not_fit_fail_in_bounded_time_and_are_counted() -> None:
    twins = make_twins(k=64, slack=1, layers=1)  # 260 slots
    selection = torch.stack([torch.arange(400) for _ in range(4)]).int()
    out = ops.resolve(
        twins.pool.tables, twins.pool.counters, twins.state, 0, selection.cuda(),
        torch.arange(4).cuda(), twins.page_table.cuda(), twins.host[0], twins.pool.records[0],
        by_recency=True, begins_step=True,
    )  # fmt: skip
    torch.cuda.synchronize()
    assert int(twins.pool.counters.failed[0]) == 1600 - 260
    assert int((out == -1).sum()) == 1600 - 260
    assert int(twins.pool.counters.exhausted[0]) == 1
    twins.step = 1
    twins.cpu_pool = None
    twins.check()


def test_an_order_that_runs_out_is_helped_by_laps() -> None:
    twins = make_twins(k=64, slack=1, layers=1)
    lines = torch.arange(4)
    for start in (0, 64, 128, 192, 256):  # no rebuild in between: every miss walks past the list's end
        twins.insert(torch.full((4,), -1))
        twins.resolve(0, torch.arange(start, start + 64).repeat(4, 1).int(), lines)
    assert int(twins.pool.counters.failed[0]) == 0
    assert int(twins.pool.counters.exhausted[0]) > 0
    twins.cpu_pool = None
    twins.check()


def test_a_slot_that_was_refilled_since_the_list_was_made_is_passed_over() -> None:
    twins = make_twins(requests=2, k=64, slack=64, layers=1)  # 256 slots
    lines = torch.tensor([0, 1])
    full_step(twins, torch.arange(128).view(2, 64)[[0, 0]].int(), lines)
    full_step(twins, torch.arange(64, 128).repeat(2, 1).int(), lines)  # full: every slot is on the list
    twins.state.control[:, 9] = 0
    twins.release(twins.rows(0, torch.arange(64)))  # the oldest slots of the list are free again ...
    twins.stage(twins.rows(0, torch.arange(200, 264)))  # ... and filled with the newest records
    twins.insert(torch.full((2,), -1))
    twins.resolve(0, torch.stack([torch.arange(300, 332), torch.full((32,), -1)]).int(), lines)
    newest = twins.pool.layer(0).slot_of_row[twins.rows(0, torch.arange(200, 264)).cuda()]
    assert (newest >= 0).all(), "the newest records left first"
    twins.check()


def test_positions_without_a_page_touch_nobody() -> None:
    twins = make_twins(layers=1)
    before = twins.pool.tables.slot_of_row.clone()
    wild = torch.tensor([[-1, -5, -(2**31), 2**31 - 1, 512, 513, 10**6]], dtype=torch.int32)
    slots = full_step(twins, wild, torch.tensor([0]))
    assert (slots == -1).all()
    twins.page_table[1] = -1
    assert (full_step(twins, torch.arange(64).int()[None], torch.tensor([1])) == -1).all()
    assert torch.equal(before, twins.pool.tables.slot_of_row)
    twins.check()


def test_strided_selection() -> None:
    twins = make_twins(layers=1)
    wide = torch.full((4, 200), 10**6, dtype=torch.int32)
    wide[:, :64] = torch.arange(64)
    table, lines = twins.page_table.cuda(), torch.arange(4).cuda()
    slots = ops.resolve(
        twins.pool.tables, twins.pool.counters, twins.state, 0, wide.cuda()[:, :64], lines, table, twins.host[0],
        twins.pool.records[0], by_recency=True, begins_step=True,
    )  # fmt: skip
    rows = torch.stack([twins.rows(line, torch.arange(64)) for line in range(4)])
    twins.check_slots(0, rows, slots)


def test_a_miss_plan_fetches_the_same_into_another_layer() -> None:
    twins = make_twins(record_bytes=1152)
    plan = new_miss_plan(4 * 64, twins.gpu)
    selection = torch.stack([torch.randperm(500)[:64] for _ in range(4)]).int()
    slots = full_step(twins, selection, torch.arange(4), plan=plan)
    assert int(plan.num_misses) == 4 * 64
    ops.replay(plan, twins.host[1], twins.pool.records[1])
    rows = torch.stack([twins.rows(line, selection[line].long()) for line in range(4)])
    twins.check_slots(1, rows, slots)


def test_an_empty_selection_empties_the_plan() -> None:
    twins = make_twins()
    plan = new_miss_plan(4 * 64, twins.gpu)
    lines = torch.arange(4)
    full_step(twins, torch.arange(64).repeat(4, 1).int(), lines, plan=plan)
    assert int(plan.num_misses) == 4 * 64
    full_step(twins, torch.empty(4, 0, dtype=torch.int32), lines, plan=plan)
    assert int(plan.num_misses) == 0
    twins.check()


def test_launches_that_overlap_see_each_others_work() -> None:
    """A graph of resolves alone, each beginning while the one before it ends; every slot of every one is checked."""
    twins = make_twins(requests=4, k=64, slack=1, layers=1, record_bytes=656, with_reference=False)
    steps, table, lines = 24, twins.page_table.cuda(), torch.arange(4).cuda()
    random = torch.Generator().manual_seed(0)
    chosen = torch.stack(
        [torch.stack([torch.randperm(512, generator=random)[:64] for _ in range(4)]) for _ in range(steps)]
    )
    selection, slots = chosen.int().cuda(), torch.empty(steps, 4, 64, dtype=torch.int32, device="cuda")
    copies = torch.empty(steps, 4 * 64, 656, dtype=torch.uint8, device="cuda")

    def resolve_all() -> None:
        for step in range(steps):
            ops.resolve(
                twins.pool.tables, twins.pool.counters, twins.state, 0, selection[step], lines, table, twins.host[0],
                twins.pool.records[0], by_recency=True, slots=slots[step], begins_step=True,
            )  # fmt: skip
            if step % 3 == 2:  # three overlap, then the last one's result is looked at
                torch.index_select(twins.pool.records[0], 0, slots[step].flatten(), out=copies[step])

    resolve_all()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        resolve_all()
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    for step in range(2, steps, 3):
        rows = torch.stack([twins.rows(line, chosen[step, line]) for line in range(4)]).flatten()
        assert torch.equal(copies[step], twins.truth[0][rows.cuda()])
    twins.check()


def test_counts_that_wrap() -> None:
    twins = make_twins(slack=1)
    twins.state.control[:, 1] = 2**31 - 2**26  # arrived, high word: the misses' 24 bits are nearly full
    twins.state.control[:, 3] = 2**31 - 2**26  # done
    twins.state.control[:, 5:7] = -3  # passed, lap: three before 2**32
    twins.state.control[:, 9] = -3  # passed when the list was made
    drive(twins, 25, seed=6)


def test_stamps_near_their_limit() -> None:
    twins = make_twins(slack=1)
    twins.step = 2**30 - 60
    twins.state.step.fill_(twins.step)
    drive(twins, 25, seed=5)


def test_the_no_io_oracle_moves_no_record() -> None:
    twins = make_twins(layers=1)
    table, lines = twins.page_table.cuda(), torch.arange(4).cuda()
    selection = torch.arange(64).repeat(4, 1).int().cuda()
    slots = ops.resolve(
        twins.pool.tables, twins.pool.counters, twins.state, 0, selection, lines, table, twins.host[0],
        twins.pool.records[0], by_recency=True, begins_step=True, io=False,
    )  # fmt: skip
    assert slots.unique().numel() == 256
    assert (twins.pool.records == 0xFF).all()


def test_a_captured_step_replays_with_new_selections_and_batch_sizes() -> None:
    twins = make_twins(layers=2, k=64, slack=8)
    selection = torch.full((4, 64), -1, dtype=torch.int32, device="cuda")
    lines = torch.full((4,), -1, device="cuda")
    rows = torch.full((4,), -1, dtype=torch.int64, device="cuda")
    table = twins.page_table.cuda()
    slots = torch.empty(2, 4, 64, dtype=torch.int32, device="cuda")
    side = torch.cuda.Stream()

    def step() -> None:
        ops.insert(twins.pool.tables, twins.pool.counters, twins.state, rows, by_recency=True)
        for layer in range(2):
            ops.resolve(
                twins.pool.tables, twins.pool.counters, twins.state, layer, selection, lines, table,
                twins.host[layer], twins.pool.records[layer], by_recency=True, slots=slots[layer],
            )  # fmt: skip
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            ops.rebuild_order(twins.pool.tables, twins.pool.counters, twins.state, policy="lru")
        torch.cuda.current_stream().wait_stream(side)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in range(30):
        random = torch.Generator().manual_seed(seed)
        live = torch.rand(4, generator=random) < 0.7
        chosen = torch.stack([torch.randperm(512, generator=random)[:64] for _ in range(4)]).int()
        now = torch.where(live, torch.arange(4), -1)
        selection.copy_(chosen)
        lines.copy_(now)
        graph.replay()
        torch.cuda.synchronize()
        wanted = torch.stack([twins.rows(line, chosen[line].long()) for line in range(4)])
        wanted[~live] = -1
        for layer in range(2):
            twins.check_slots(layer, wanted, slots[layer])
    twins.cpu_pool = None
    twins.check()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"selection": torch.zeros(4, 64, dtype=torch.int64)}, "selection must be torch.int32"),
        ({"selection": torch.zeros(4, 64, dtype=torch.int32)}, "selection must be on"),
        ({"lines": torch.zeros(3, device="meta")}, "request_index must"),
        ({"host": torch.zeros(512 * 4, 64, dtype=torch.uint8)}, "pinned"),
        ({"host": torch.zeros(512 * 4, 48, dtype=torch.uint8)}, "host must be uint8"),
    ],
)
def test_bad_arguments_are_refused(changes: dict[str, Tensor], message: str) -> None:
    twins = make_twins(layers=1)
    before = [table.clone() for table in twins.pool.tables]
    given = {
        "selection": torch.zeros(4, 64, dtype=torch.int32, device="cuda"),
        "lines": torch.arange(4, device="cuda"),
        "host": twins.host[0],
    } | changes
    with pytest.raises(ValueError, match=message):
        ops.resolve(
            twins.pool.tables, twins.pool.counters, twins.state, 0, given["selection"], given["lines"],
            twins.page_table.cuda(), given["host"], twins.pool.records[0], by_recency=True,
        )  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(before, twins.pool.tables, strict=True))
