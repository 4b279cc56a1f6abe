"""The DSA selector against its formula in float64, a sort, and transformers' indexer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hisparse.selectors import DSA, Indexed

HEADS, DIM, PAGE = 8, 16, 64
LENGTHS = [1, 63, 64, 65, 200, 1024, 1025, 2500]
FORMATS: dict[str, Callable[[int], DSA]] = {
    "float32": lambda top_k: DSA(top_k=top_k, head_dim=DIM, dtype=torch.float32),
    "bfloat16": lambda top_k: DSA(top_k=top_k, head_dim=DIM),
    "fp8": lambda top_k: DSA(top_k=top_k, head_dim=DIM, fp8=True),
}


class Histories:
    """Random keys of several requests in pages, shuffled or in order, with garbage wherever no key was written."""

    def __init__(self, selector: DSA, lengths: list[int], *, shuffled: bool = True, pieces: int = 3) -> None:
        random = torch.Generator().manual_seed(0)
        self.selector = selector
        self.lengths = torch.tensor(lengths)
        self.keys = [torch.randn(n, DIM, generator=random) for n in lengths]
        self.query = torch.randn(len(lengths), HEADS, DIM, generator=random)
        self.weights = torch.randn(len(lengths), HEADS, generator=random)
        used = [-(-length // PAGE) for length in lengths]
        shape = (sum(used) + 3, *selector.page_shape)
        garbage = torch.full(shape, torch.nan) if selector.dtype.is_floating_point else torch.full(shape, 0xFF)
        self.state = garbage.to(selector.dtype)  # 0xFF is NaN in float8 and in float32
        order = torch.randperm(shape[0], generator=random) if shuffled else torch.arange(shape[0])
        self.table = torch.full((len(lengths), max(used) + 1), -1, dtype=torch.int32)
        for i, pages in enumerate(order[: sum(used)].split(used)):
            self.table[i, : used[i]] = pages
            for chunk in torch.arange(lengths[i]).tensor_split(pieces):
                selector.append(self.state, self.table[i, chunk // PAGE].long(), chunk, self.keys[i][chunk])

    def select(self) -> Tensor:
        return self.index().positions

    def index(self) -> Indexed:
        return self.selector.select(self.state, self.table, self.lengths, self.query, self.weights)

    def scores_of(self, positions: Tensor) -> Tensor:
        return self.selector.scores_of(self.state, self.table, self.query, self.weights, positions)

    def all_scores(self) -> Tensor:
        """Of every position, [b, longest]; -inf past the end of a history."""
        positions = torch.arange(max(self.lengths)).expand(len(self.lengths), -1)
        return self.scores_of(positions.masked_fill(positions >= self.lengths[:, None], -1))


def formula(query: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Queries [n, heads, dim] with keys [m, dim]: the definition, in float64."""
    each_head = torch.einsum("nhd,md->nhm", query.double(), keys.double()).relu()
    return torch.einsum("nh,nhm->nm", weights.double(), each_head)


def sorted_choice(scores: Tensor, top_k: int) -> list[int]:
    """The best positions by (score descending, position ascending), then in ascending order."""
    ranked = sorted(range(len(scores)), key=lambda p: (-float(scores[p]), p))
    return sorted(ranked[:top_k])


def unpad(selection: Tensor) -> list[int]:
    """The positions of one selection; pads may only stand at its end."""
    positions: list[int] = selection.tolist()
    used = [p for p in positions if p >= 0]
    assert positions == used + [-1] * (len(positions) - len(used))
    return used


# What a key loses in its format: half a unit in the last place of 8 or 4 significant bits, and float32 arithmetic.
@pytest.mark.parametrize(("name", "error"), [("float32", 1e-6), ("bfloat16", 2**-8), ("fp8", 2**-4)])
def test_scores_are_the_formula(name: str, error: float) -> None:
    histories = Histories(FORMATS[name](32), LENGTHS)
    scores = histories.all_scores()
    for i, length in enumerate(LENGTHS):
        q, w, keys = histories.query[i : i + 1], histories.weights[i : i + 1], histories.keys[i]
        bound = formula(q.abs(), w.abs(), keys.abs())[0] * error
        assert ((scores[i, :length].double() - formula(q, w, keys)[0]).abs() <= bound).all()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("top_k", [1, 32, 63, 64, 1024])
def test_selection_is_the_best_scored(name: str, top_k: int) -> None:
    histories = Histories(FORMATS[name](top_k), LENGTHS)
    scores, selection = histories.all_scores(), histories.select()
    assert selection.dtype == torch.int32
    assert list(selection.shape) == [len(LENGTHS), top_k]
    for i, length in enumerate(LENGTHS):
        assert unpad(selection[i]) == sorted_choice(scores[i, :length], top_k)


@pytest.mark.parametrize("name", FORMATS)
def test_pages_and_batch_do_not_change_a_bit(name: str) -> None:
    shuffled = Histories(FORMATS[name](32), LENGTHS)
    in_order = Histories(FORMATS[name](32), LENGTHS, shuffled=False)
    scores = shuffled.all_scores()
    assert torch.equal(scores, in_order.all_scores())
    assert torch.equal(shuffled.select(), in_order.select())
    last = [getattr(in_order, field)[-1:] for field in ("table", "lengths", "query", "weights")]
    alone = in_order.selector.select(in_order.state, *last)
    assert torch.equal(alone.positions, shuffled.select()[-1:])


def test_length_of_a_history_does_not_change_a_score() -> None:
    histories = Histories(FORMATS["float32"](32), [2500])
    early = histories.scores_of(torch.arange(700)[None])
    assert torch.equal(early, histories.all_scores()[:, :700])


def test_equal_scores_go_to_the_lower_position() -> None:
    histories = Histories(FORMATS["float32"](5), [3000])
    histories.query.zero_()
    assert unpad(histories.select()[0]) == [0, 1, 2, 3, 4]
    selector = histories.selector
    histories.query[:, 0, 0], histories.weights[:] = 1, 1
    keys = torch.zeros(3000, DIM)
    keys[[2999, 1500], 0] = 2.0
    keys[[70, 1, 1023, 1024, 2048], 0] = 1.0  # three places are left for these five
    selector.append(histories.state, histories.table[0, torch.arange(3000) // PAGE].long(), torch.arange(3000), keys)
    assert unpad(histories.select()[0]) == [1, 70, 1023, 1500, 2999]


def test_negative_weights_rank_below_zero() -> None:
    histories = Histories(FORMATS["float32"](100), [300])
    histories.weights = -histories.weights.abs()
    scores = histories.all_scores()
    assert (scores <= 0).all()
    assert unpad(histories.select()[0]) == sorted_choice(scores[0], 100)


def test_kth_score_is_the_lowest_selected() -> None:
    histories = Histories(FORMATS["float32"](64), LENGTHS)
    selected = histories.index()
    chosen = histories.scores_of(selected.positions)
    for i, length in enumerate(LENGTHS):
        want = chosen[i].amin() if length > 64 else torch.tensor(-torch.inf)
        assert torch.equal(selected.kth_score[i], want)


@pytest.mark.parametrize("name", FORMATS)
def test_the_best_positions_in_order(name: str) -> None:
    histories = Histories(FORMATS[name](64), LENGTHS)
    ranking, scores = histories.index().best(200), histories.all_scores()
    for i, length in enumerate(LENGTHS):
        count = min(length, 200)
        assert torch.equal(ranking.scores[i, :count], scores[i].sort(descending=True).values[:count])
        assert torch.equal(ranking.scores[i, :count], scores[i, ranking.positions[i, :count].long()])
        assert (ranking.positions[i, count:] == -1).all()
        assert (ranking.scores[i, count:] == -torch.inf).all()


def test_scores_of_keeps_order_and_pads() -> None:
    histories = Histories(FORMATS["float32"](8), [100, 1500, 5])
    positions = torch.tensor([[99, -1, 0], [3, 1499, -1], [-1, -1, -1]], dtype=torch.int32)
    got, scores = histories.scores_of(positions), histories.all_scores()
    for i, row in enumerate(positions.tolist()):
        for j, position in enumerate(row):
            assert got[i, j] == (scores[i, position] if position >= 0 else -torch.inf)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("start", "length"), [(0, 1500), (0, 65), (100, 101), (1000, 1200), (60, 130)])
def test_chunk_selects_what_decoding_would(name: str, start: int, length: int) -> None:
    selector = FORMATS[name](64)
    histories = Histories(selector, [length])
    n, random = length - start, torch.Generator().manual_seed(1)
    query, weights = torch.randn(n, HEADS, DIM, generator=random), torch.randn(n, HEADS, generator=random)
    positions = torch.arange(start, length)
    mask = selector.select_causal(histories.state, histories.table[0], positions, query, weights)
    assert mask is not None
    assert mask.dtype == torch.bool
    assert list(mask.shape) == [n, length]
    decoded = selector.select(histories.state, histories.table.expand(n, -1), positions + 1, query, weights).positions
    for row, selection in zip(mask, decoded, strict=True):
        assert row.nonzero()[:, 0].tolist() == unpad(selection)


def test_chunk_ties_go_to_the_lower_position() -> None:
    selector = FORMATS["float32"](7)
    histories = Histories(selector, [20])
    zeros = torch.zeros(20, HEADS, DIM)
    mask = selector.select_causal(histories.state, histories.table[0], torch.arange(20), zeros, torch.ones(20, HEADS))
    assert mask is not None
    assert [row.nonzero()[:, 0].tolist() for row in mask] == [list(range(min(i + 1, 7))) for i in range(20)]


def test_short_history_is_read_whole() -> None:
    selector = FORMATS["bfloat16"](64)
    histories = Histories(selector, [64, 10])
    query, weights = torch.randn(14, HEADS, DIM), torch.randn(14, HEADS)
    assert selector.select_causal(histories.state, histories.table[0], torch.arange(50, 64), query, weights) is None
    assert [unpad(row) for row in histories.select()] == [list(range(64)), list(range(10))]


def test_padding_row_selects_nothing() -> None:
    histories = Histories(FORMATS["float32"](4), [200])
    table = torch.cat((histories.table, torch.full_like(histories.table, -1)))
    query, weights = histories.query.expand(2, -1, -1), histories.weights.expand(2, -1)
    selection = histories.selector.select(histories.state, table, torch.tensor([200, 0]), query, weights).positions
    assert selection[1].tolist() == [-1] * 4
    assert torch.equal(selection[:1], histories.select())


def test_strided_views_select_the_same() -> None:
    histories = Histories(FORMATS["float32"](32), LENGTHS)
    want = histories.select()
    histories.query = histories.query.transpose(1, 2).contiguous().transpose(1, 2)
    histories.weights = torch.stack((histories.weights, histories.weights), dim=-1)[..., 0]
    assert torch.equal(histories.select(), want)


class LargestTensor(TorchDispatchMode):
    """Remembers how many elements the largest tensor made has."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.num_elements = max(self.num_elements, result.numel())
        return result


def test_memory_of_a_chunk_is_bounded() -> None:
    """Nothing has more elements than the mask that is returned; [n, heads, T] would have eight times as many."""
    selector = FORMATS["float32"](32)
    histories = Histories(selector, [5000])
    query, weights = torch.randn(512, HEADS, DIM), torch.randn(512, HEADS)
    with LargestTensor() as largest:
        selector.select_causal(histories.state, histories.table[0], torch.arange(4488, 5000), query, weights)
    assert largest.num_elements == 512 * 5000


def test_state_bytes() -> None:
    assert DSA(top_k=1, head_dim=128, fp8=True).state_bytes_per_token == 132
    assert DSA(top_k=1, head_dim=128).state_bytes_per_token == 256
    assert DSA(top_k=1, head_dim=128, fp8=True).dtype == torch.uint8


@pytest.mark.parametrize(
    ("options", "message"),
    [({"top_k": 0, "head_dim": 8}, "top_k must be"), ({"top_k": 1, "head_dim": 256, "fp8": True}, "at most 128")],
)
def test_bad_arguments(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DSA(**options)  # type: ignore[arg-type]


def test_bad_shapes_are_named() -> None:
    histories = Histories(FORMATS["float32"](4), [200])
    histories.weights = histories.weights[:, :-1]
    with pytest.raises(ValueError, match=r"got \[1, 8, 16\] and \[1, 7\]"):
        histories.select()


def test_missing_page_is_an_error() -> None:
    histories = Histories(FORMATS["float32"](4), [200])
    histories.table[0, 1] = -1
    with pytest.raises(IndexError):
        histories.select()


ORACLE_HEADS = 16  # with 8, one position in 256 scores exactly 0, and transformers breaks such ties in any order


class Oracle:
    """transformers' indexer with random weights, and what its projections hand to a selector."""

    def __init__(self, top_k: int, length: int) -> None:
        from transformers import DeepseekV32Config
        from transformers.models.deepseek_v32 import modeling_deepseek_v32 as modeling

        config = DeepseekV32Config(
            hidden_size=64,
            q_lora_rank=32,
            qk_rope_head_dim=8,
            index_n_heads=ORACLE_HEADS,
            index_head_dim=DIM,
            index_topk=top_k,
        )
        torch.manual_seed(0)
        self.indexer = modeling.DeepseekV32Indexer(config, 0).float().eval()
        hidden, low_rank = torch.randn(1, length, 64), torch.randn(1, length, 32)
        angles = torch.arange(length)[None, :, None] * torch.tensor([1.0, 0.1, 0.01, 0.001]).repeat(2)
        causal = torch.ones(length, length, dtype=torch.bool).tril()[None]
        with torch.no_grad():
            cos_sin = (angles.cos(), angles.sin())
            self.indices = self.indexer(hidden, low_rank, cos_sin, causal, torch.arange(length)[None])[0]
            query = self.indexer.wq_b(low_rank).view(1, length, ORACLE_HEADS, DIM)
            key = self.indexer.k_norm(self.indexer.wk(hidden))[:, :, None]
            rotated = modeling.apply_rotary_pos_emb(query[..., :8], key[..., :8], *cos_sin, unsqueeze_dim=2)
            self.query = torch.cat((rotated[0], query[..., 8:]), dim=-1)[0]
            self.key = torch.cat((rotated[1], key[..., 8:]), dim=-1)[0, :, 0]
            self.weights = self.indexer.weights_proj(hidden)[0] * (ORACLE_HEADS * DIM) ** -0.5

    def filled(self, selector: DSA) -> tuple[Tensor, Tensor]:
        """The state with the oracle's keys, and its pages."""
        positions = torch.arange(len(self.key))
        pages = torch.arange(int(positions[-1]) // PAGE, -1, -1)
        state = torch.full((len(pages), *selector.page_shape), torch.nan)
        selector.append(state, pages[positions // PAGE], positions, self.key)
        return state, pages


def test_chunk_selects_what_transformers_selects() -> None:
    oracle, selector = Oracle(top_k=40, length=300), FORMATS["float32"](40)
    state, pages = oracle.filled(selector)
    mask = selector.select_causal(state, pages, torch.arange(300), oracle.query, oracle.weights)
    assert mask is not None
    for own, (row, indices) in enumerate(zip(mask, oracle.indices.tolist(), strict=True)):
        assert row.nonzero()[:, 0].tolist() == sorted(p for p in indices if p <= own)


def test_scores_rank_as_transformers_ranks() -> None:
    """The oracle returns positions alone: with top_k at the history's length, all of them, best first."""
    oracle, selector = Oracle(top_k=300, length=300), FORMATS["float32"](40)
    state, pages = oracle.filled(selector)
    ranked = oracle.indices[-20:]  # of the last queries, with histories of 281 to 300
    table = pages.expand(20, -1)
    scores = selector.scores_of(state, table, oracle.query[-20:], oracle.weights[-20:], ranked)
    for row, own, order in zip(scores, range(280, 300), ranked, strict=True):
        visible = row[order <= own]
        assert len(visible) == own + 1
        assert (visible.diff() <= 1e-6).all()  # float32, summed in another order
