"""The indexer's kernels against the torch reference of the same selector, and their top-k against a sort."""

import math

import pytest
import torch
from torch import Tensor

from hisparse.errors import ModelOutputError
from hisparse.kernels.top_k import top_k
from hisparse.selectors import DSA
from hisparse.selectors.dsa import best_scored, score_keys

pytestmark = pytest.mark.gpu

LENGTHS = [1, 64, 512, 513, 1000, 5000, 40_001, 131_072]
SHAPES = [(32, 128), (64, 128), (8, 64), (96, 96)]  # index heads, head_dim


class Histories:
    """Keys of several requests in shuffled pages, NaN wherever no key was written."""

    def __init__(self, heads: int, head_dim: int, *, fp8: bool, k: int = 512, lengths: list[int] = LENGTHS) -> None:
        torch.manual_seed(heads)
        if fp8:
            head_dim = -(-head_dim // 64) * 64  # what has a kernel
        self.selector = DSA(top_k=k, head_dim=head_dim, fp8=fp8)
        self.lengths = torch.tensor(lengths, device="cuda")
        pages = -(-max(lengths) // 64)
        shape = (len(lengths) * pages, *self.selector.page_shape)
        self.state = torch.empty(shape, dtype=self.selector.dtype, device="cuda")
        self.state.view(torch.uint8).fill_(0xFF)
        self.table = torch.randperm(shape[0], device="cuda").int().view(len(lengths), pages)
        for line, length in zip(self.table, lengths, strict=True):
            positions = torch.arange(length, device="cuda")
            keys = torch.randn(length, head_dim, device="cuda").bfloat16()
            self.selector.append(self.state, line[positions // 64].long(), positions, keys)
        self.query = torch.randn(len(lengths), heads, head_dim, device="cuda").bfloat16()
        self.weights = torch.randn(len(lengths), heads, device="cuda")

    def scores(self) -> list[Tensor]:
        """Of each history, by the kernel."""
        every = torch.arange(int(self.lengths.max()), device="cuda").expand(len(self.lengths), -1)
        every = every.masked_fill(every >= self.lengths[:, None], -1)
        scores = self.selector.scores_of(self.state, self.table, self.query, self.weights, every)
        return [line[:length] for line, length in zip(scores, self.lengths.tolist(), strict=True)]


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("heads", "head_dim"), SHAPES)
def test_scores_are_the_reference(heads: int, head_dim: int, fp8: bool) -> None:
    histories = Histories(heads, head_dim, fp8=fp8)
    for i, scores in enumerate(histories.scores()):
        keys = histories.selector._read(histories.state, histories.table[i], len(scores))
        want = score_keys(keys, histories.query[i : i + 1], histories.weights[i : i + 1])[0, : len(scores)]
        # the order of a sum of heads * head_dim products differs; both are float32
        assert (scores - want).abs().max() <= 4e-6 * want.abs().max()


@pytest.mark.parametrize("fp8", [False, True])
def test_selection_is_the_best_scored(fp8: bool) -> None:
    histories = Histories(32, 128, fp8=fp8)
    arguments = histories.state, histories.table, histories.lengths, histories.query, histories.weights
    selected = histories.selector.select(*arguments)
    for positions, kth, scores in zip(selected.positions, selected.kth_score, histories.scores(), strict=True):
        if len(scores) <= 512:
            assert positions.tolist() == [*range(len(scores)), *[-1] * (512 - len(scores))]
            assert kth == -math.inf
        else:
            best, want = best_scored(scores[None], 512)
            assert torch.equal(positions, best[0].nonzero()[:, 0].int())
            assert torch.equal(kth, want[0])
    histories.selector.check_finite()


def test_the_best_positions_in_order() -> None:
    histories = Histories(32, 128, fp8=False)
    arguments = histories.state, histories.table, histories.lengths, histories.query, histories.weights
    ranking = histories.selector.select(*arguments).best(1024)
    for positions, values, scores in zip(ranking.positions, ranking.scores, histories.scores(), strict=True):
        count = min(len(scores), 1024)
        assert torch.equal(values[:count], scores.sort(descending=True).values[:count])
        assert torch.equal(values[:count], scores[positions[:count].long()])
        assert (positions[count:] == -1).all()
        assert (values[count:] == -math.inf).all()


def test_chunk_selects_what_decoding_would() -> None:
    histories = Histories(32, 128, fp8=False, lengths=[3000])
    positions = torch.arange(2800, 3000, device="cuda")
    query = torch.randn(200, 32, 128, device="cuda").bfloat16()
    weights = torch.randn(200, 32, device="cuda")
    mask = histories.selector.select_causal(histories.state, histories.table[0], positions, query, weights)
    assert mask is not None
    assert mask.shape == (200, 3000)
    table = histories.table.expand(200, -1)
    decoded = histories.selector.select(histories.state, table, positions + 1, query, weights).positions
    for row, selection in zip(mask, decoded, strict=True):
        assert torch.equal(row.nonzero()[:, 0].int(), selection[selection >= 0])


@pytest.mark.parametrize("k", [1, 31, 512, 2048])
@pytest.mark.parametrize("kind", ["random", "ties", "equal", "few values", "negative", "ascending", "one octave"])
def test_top_k_is_a_stable_sort(kind: str, k: int) -> None:
    torch.manual_seed(k)
    width = 20_000 // 32 * 32
    scores = torch.randn(7, width, device="cuda")
    if kind == "ties":
        scores = (scores * 8).round() / 8
    elif kind == "equal":
        scores = torch.zeros_like(scores)
    elif kind == "few values":
        scores = (scores > 2.5).float() - (scores < 0).float()
    elif kind == "negative":
        scores = -scores.abs() - 1e-30
    elif kind == "ascending":
        scores = torch.arange(width, device="cuda").float().expand(7, -1).contiguous()
    elif kind == "one octave":
        scores = 1 + scores.sigmoid()
    lengths = torch.tensor([1, k, min(k + 1, width), 2049, 4097, width - 1, width], device="cuda")
    positions, kth = top_k(scores, lengths, k)
    for line, row, value, length in zip(scores, positions, kth, lengths.tolist(), strict=True):
        order = line[:length].sort(descending=True, stable=True).indices[:k].sort().values
        assert row.tolist() == [*order.tolist(), *[-1] * (k - len(order))]
        assert value == (line[order].min() if length > k else -math.inf)


@pytest.mark.parametrize("value", [0.0, -1.5, math.nan])
def test_ties_of_a_long_history(value: float) -> None:
    """More neighbours of one score than a block writes out at a time, and all that is written lies in the result."""
    k, width, lengths = 512, 131_072, [131_072, 65_537, 32_769, 32_768]
    scores = torch.full((4, width), value, device="cuda")
    memory = torch.full((4, width), -7, dtype=torch.int32, device="cuda")
    positions, kth = memory[2, : 4 * k].view(4, k), torch.empty(4, device="cuda")
    torch.ops.hisparse.top_k(scores, torch.tensor(lengths, device="cuda"), positions, kth, None)
    assert positions.tolist() == [list(range(k))] * 4
    assert torch.equal(kth.nan_to_num(7), torch.full_like(kth, value).nan_to_num(7))
    positions.fill_(-7)
    assert (memory == -7).all()


@pytest.mark.parametrize("damaged", ["key", "query"])
def test_a_damaged_key_or_query_is_an_error(damaged: str) -> None:
    histories = Histories(32, 128, fp8=False, lengths=[900, 1000])
    if damaged == "key":
        histories.state[histories.table[1, 3], 5] = math.nan
    else:
        histories.query[1, 7, 3] = math.nan
    histories.selector.select(histories.state, histories.table, histories.lengths, histories.query, histories.weights)
    with pytest.raises(ModelOutputError, match="NaN or infinite"):
        histories.selector.check_finite()


def test_is_captured_and_replayed_with_other_lengths() -> None:
    histories = Histories(32, 128, fp8=False)

    def select() -> Tensor:
        arguments = histories.state, histories.table, histories.lengths, histories.query, histories.weights
        return histories.selector.select(*arguments).positions

    select()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = select()
    histories.lengths -= histories.lengths // 3
    histories.weights.neg_()
    graph.replay()
    assert torch.equal(recorded, select())


@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
def test_scores_that_are_not_finite_are_an_error(value: float) -> None:
    histories = Histories(32, 128, fp8=False, lengths=[900, 1000])
    histories.weights[1, 0] = value
    arguments = histories.state, histories.table, histories.lengths, histories.query, histories.weights
    selection = histories.selector.select(*arguments).positions
    assert ((selection >= -1) & (selection < histories.lengths[:, None])).all()
    with pytest.raises(ModelOutputError, match="NaN or infinite"):
        histories.selector.check_finite()
    histories.weights.fill_(1)
    histories.selector.select(*arguments)
    histories.selector.check_finite()
