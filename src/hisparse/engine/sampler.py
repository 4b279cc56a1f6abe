"""Logits to tokens: greedy, or sampled by temperature, top-k and top-p from each request's own random stream.

All of it is done where the logits are, for all requests at once; a sampled token takes one number of its request's
stream, so the other requests of a batch do not choose for it.
"""

import random
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from hisparse.engine.request import Request

ROWS = 16  # drawn from at a time: memory stays bounded for any batch
NO_TOKEN = -1
TEMPERATURES = 1e-30, 1e30  # in float32; beyond, the likeliest tokens alone are left, or all are equal, in any case


_Choice = tuple[int, float, float, int, float]  # line, a number of the stream, temperature, top_k, top_p


class Sampler:
    """Chooses one token for each request and keeps each request's random stream."""

    def __init__(self) -> None:
        self._streams: dict[int, random.Random] = {}

    def choose(self, logits: Tensor, requests: Sequence[Request]) -> Tensor:
        """A token for each row of `logits` ([b, vocab] float32), int64 [b], without waiting for a GPU.

        NO_TOKEN for a row that cannot be sampled from: it holds NaN, positive infinity, or negative infinity alone.
        """
        tokens = _likeliest(logits)
        plain: list[_Choice] = []
        restricted: list[_Choice] = []  # by top-k or top-p
        for line, request in enumerate(requests):
            params = request.params
            if params.temperature > 0:
                is_plain = params.top_k == 0 and params.top_p == 1
                (plain if is_plain else restricted).append(self._choice(line, request, logits.shape[-1]))
        if plain or restricted:
            values = _upload(plain + restricted, logits.device)
            _draw_into(tokens, logits, values[: len(plain)], _draw)
            most = max((choice[3] for choice in restricted), default=0)
            _draw_into(tokens, logits, values[len(plain) :], partial(_draw_restricted, most))
        return tokens

    def forget(self, request: Request) -> None:
        """Drop the random stream of a request that ended."""
        self._streams.pop(request.id, None)

    def _choice(self, line: int, request: Request, vocab: int) -> _Choice:
        params = request.params
        if request.id not in self._streams:
            seed = None if params.seed is None else str(params.seed)  # as numbers, -1 and 1 are one seed
            self._streams[request.id] = random.Random(seed)
        number = self._streams[request.id].random()
        return line, number, params.temperature, min(params.top_k or vocab, vocab), params.top_p


def _upload(choices: Sequence[_Choice], device: torch.device) -> Tensor:
    """float64 [m, 5]; a copy that does not wait for the device."""
    values = torch.tensor(choices, dtype=torch.float64, device="cpu")
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


def _draw_into(tokens: Tensor, logits: Tensor, values: Tensor, draw: Callable[..., Tensor]) -> None:
    """Replace the tokens of some lines by drawn ones, but not those of rows that cannot be sampled from."""
    for piece in values.split(ROWS) if len(values) else ():
        line, *columns = piece.unbind(1)
        lines = line.long()
        drawn = draw(logits[lines], *(column[:, None] for column in columns))
        tokens[lines] = torch.where(tokens[lines] == NO_TOKEN, NO_TOKEN, drawn)


def _likeliest(logits: Tensor) -> Tensor:
    """The first of each row's largest, int64 [b]; NO_TOKEN if that is no finite number (NaN is largest)."""
    if logits.device.type == "cpu":
        tokens = torch.from_numpy(logits.numpy().argmax(axis=-1))  # a quarter of the time of torch's
        largest = logits.gather(-1, tokens[:, None])[:, 0]
    else:
        largest, tokens = logits.max(dim=-1)
    return tokens.masked_fill(~largest.isfinite(), NO_TOKEN)


def _draw(logits: Tensor, number: Tensor, temperature: Tensor, *_: Tensor) -> Tensor:
    """Tokens of rows [m, vocab] without top-k and top-p, int64 [m]; all else is float64 [m, 1], as in `_Choice`."""
    return _pick(_weights(logits, logits.amax(dim=-1, keepdim=True), temperature), number)


def _draw_restricted(
    most: int, logits: Tensor, number: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor
) -> Tensor:
    """The same among the top_k likeliest, and of those the fewest that have the probability top_p together.

    `most` is the largest top_k. On a CPU fewer tokens are sorted where that is certain to change nothing.
    """
    vocab = logits.shape[-1]
    weights = _weights(logits, logits.amax(dim=-1, keepdim=True), temperature)
    total = weights.sum(dim=-1, keepdim=True, dtype=torch.float64)
    if logits.device.type == "cpu":
        # all tokens below (1 - p) / vocab have less than 1 - p together; half of that leaves room for rounding
        enough = (weights >= total * (1 - top_p) / 2 / vocab).sum(dim=-1, keepdim=True)
        most = max(int(torch.where(top_k < vocab, top_k, enough).max()), 1)
    tokens = _likeliest_first(logits, most)
    weights = weights.gather(-1, tokens).double()
    rank = torch.arange(most, device=logits.device)
    weights.masked_fill_(rank >= top_k, 0)
    total = torch.where(top_k < vocab, weights.sum(dim=-1, keepdim=True), total)
    before = weights.cumsum(dim=-1) - weights
    weights.masked_fill_(before >= top_p * total, 0)
    return tokens.gather(-1, _pick(weights, number)[:, None])[:, 0]


def _likeliest_first(logits: Tensor, count: int) -> Tensor:
    """The likeliest tokens of each row in order, int64 [m, count]; of equals, the first."""
    bits = (logits + 0.0).view(torch.int32)  # -0 becomes 0
    rising = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()  # integers in the order of the numbers
    last = (1 << 32) - 1
    place = last - torch.arange(logits.shape[-1], device=logits.device)
    return last - (((rising << 32) | place).topk(count, dim=-1).values & last)


def _weights(logits: Tensor, largest: Tensor, temperature: Tensor) -> Tensor:
    """Unnormalised probabilities, float32; the largest is 1, so that nothing overflows."""
    return ((logits - largest) / temperature.clamp(*TEMPERATURES).float()).exp_()


def _pick(weights: Tensor, number: Tensor) -> Tensor:
    """Where each row's sum first exceeds this share, from 0 to below 1, of the whole: never a weight of zero."""
    sums = weights.cumsum(dim=-1, dtype=torch.float64)
    whole = sums[:, -1:]
    share = torch.minimum(number * whole, whole.nextafter(torch.zeros_like(whole)))
    return torch.searchsorted(sums, share, right=True)[:, 0].clamp(max=weights.shape[-1] - 1)
