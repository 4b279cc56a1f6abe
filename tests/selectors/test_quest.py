"""Quest against a loop that scores every page by its definition."""

import math

import pytest
import torch
from torch import Tensor

from hisparse.selectors import AGGREGATIONS, Quest, Selected, Selector

HEADS, KV_HEADS, DIM, PAGE, STATE_PAGE = 6, 3, 8, 16, 64


class Histories:
    """Random keys of several requests, appended to a Quest state in pieces, in scattered pages."""

    def __init__(self, lengths: list[int], selector: Selector, pieces: int = 1, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        self.lengths = torch.tensor(lengths)
        self.keys = [torch.randn(n, KV_HEADS, DIM, generator=random) for n in lengths]
        width = -(-max(lengths) // STATE_PAGE)
        total = width * len(lengths)
        self.state = torch.full((total + 3, *selector.page_shape), torch.nan)  # garbage where nothing was written
        self.table = torch.full((len(lengths), width), -1)
        order = torch.randperm(total + 3, generator=random)
        for i, length in enumerate(lengths):
            used = -(-length // STATE_PAGE)
            self.table[i, :used] = order[i * width : i * width + used]
            for chunk in torch.arange(length).tensor_split(pieces):
                pages = self.table[i, chunk // STATE_PAGE]
                selector.append(self.state, pages, chunk, self.keys[i][chunk])
        self.query = torch.randn(len(lengths), HEADS, DIM, generator=random)

    def select_all(self, selector: Selector) -> Selected:
        return selector.select(self.state, self.table, self.lengths, self.query)

    def select(self, selector: Selector) -> Tensor:
        return self.select_all(selector).positions


def bound(query: Tensor, keys: Tensor) -> float:
    """The definition: sum over elements of the larger of q * max and q * min."""
    largest, smallest = keys.amax(0), keys.amin(0)
    return float(torch.maximum(query * largest, query * smallest).sum()) / math.sqrt(DIM)


def expected(keys: Tensor, query: Tensor, heads: range, aggregation: str, top_k: int) -> list[int]:
    length = len(keys)
    pages = range(-(-length // PAGE))
    scores = torch.tensor(
        [[bound(query[h], keys[p * PAGE : (p + 1) * PAGE, h // (HEADS // KV_HEADS)]) for p in pages] for h in heads]
    )
    total = {
        "max": lambda: scores.amax(0),
        "mean": lambda: scores.mean(0),
        "softmax_sum": lambda: scores.softmax(-1).sum(0),
        "softmax_max": lambda: scores.softmax(-1).amax(0),
        "best_rank": lambda: (
            -torch.stack([torch.tensor([float((row > x).sum()) for x in row]) for row in scores]).amin(0)
        ),
    }[aggregation]()
    total[-1] = torch.inf
    best = sorted(pages, key=lambda p: (-float(total[p]), p))[: top_k // PAGE]
    return [i for p in sorted(best) for i in range(p * PAGE, min((p + 1) * PAGE, length))]


def unpad(selection: Tensor) -> list[int]:
    """The positions of one selection; pads may only stand at its end."""
    positions: list[int] = selection.tolist()
    used = [p for p in positions if p >= 0]
    assert positions == used + [-1] * (len(positions) - len(used))
    return used


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("pieces", [1, 5])
@pytest.mark.parametrize("per_kv_head", [False, True])
def test_selection_is_the_definition(aggregation: str, pieces: int, per_kv_head: bool) -> None:
    lengths = [1, 15, 16, 17, 200, 333]
    selector = Quest(top_k=70, num_kv_heads=KV_HEADS, head_dim=DIM, aggregation=aggregation, per_kv_head=per_kv_head)
    histories = Histories(lengths, selector, pieces)
    selection = histories.select(selector)
    assert selection.dtype == torch.int32
    assert list(selection.shape) == [len(lengths), KV_HEADS if per_kv_head else 1, 64]  # whole pages
    each = HEADS // selector.num_groups
    for i in range(len(lengths)):
        for group in range(selector.num_groups):
            heads = range(group * each, (group + 1) * each)
            want = expected(histories.keys[i], histories.query[i], heads, aggregation, 70)
            assert unpad(selection[i, group]) == want


def test_newest_page_is_always_selected() -> None:
    selector = Quest(top_k=16, num_kv_heads=KV_HEADS, head_dim=DIM)
    for length in (1, 16, 17, 64, 65, 150):
        histories = Histories([length], selector, seed=length)
        assert unpad(histories.select(selector)[0, 0])[-1] == length - 1


def test_history_shorter_than_top_k_is_selected_whole() -> None:
    selector = Quest(top_k=512, num_kv_heads=KV_HEADS, head_dim=DIM)
    histories = Histories([1, 100, 400], selector)
    for length, selection in zip([1, 100, 400], histories.select(selector), strict=True):
        assert unpad(selection[0]) == list(range(length))


def test_equal_scores_go_to_the_lower_page() -> None:
    selector = Quest(top_k=48, num_kv_heads=KV_HEADS, head_dim=DIM)
    histories = Histories([160], selector)
    histories.query.zero_()
    assert unpad(histories.select(selector)[0, 0]) == [*range(32), *range(144, 160)]


def test_state_bytes_per_token() -> None:
    selector = Quest(top_k=48, num_kv_heads=3, head_dim=64)
    assert selector.state_bytes_per_token == 2 * 3 * 64 * 4 / 16


@pytest.mark.parametrize(
    ("options", "message"), [({"top_k": 15}, "at least 16"), ({"top_k": 64, "aggregation": "median"}, "one of max")]
)
def test_bad_arguments(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Quest(num_kv_heads=1, head_dim=8, **options)  # type: ignore[arg-type]


def test_the_best_positions_in_order() -> None:
    """Page after page, as selections of more and more pages would take them in."""
    lengths = [1, 40, 200, 399]
    selector = Quest(top_k=PAGE, num_kv_heads=KV_HEADS, head_dim=DIM)
    histories = Histories(lengths, selector)
    ranking = histories.select_all(selector).best(6 * PAGE).of_group(0)
    for i, length in enumerate(lengths):
        count = min(length, 6 * PAGE)
        found = ranking.positions[i, :count].tolist()
        assert len(set(found)) == count
        assert (ranking.positions[i, count:] == -1).all()
        assert (ranking.scores[i, :count].diff().nan_to_num() <= 0).all()
        assert (ranking.scores[i, count:] == -torch.inf).all()
        for num_pages in range(1, 6):
            wider = Quest(top_k=num_pages * PAGE, num_kv_heads=KV_HEADS, head_dim=DIM)
            chosen = unpad(histories.select(wider)[i, 0])
            assert sorted(found[: len(chosen)]) == chosen
