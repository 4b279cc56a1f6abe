"""Logits to tokens: greedy, or sampled by temperature, top-k and top-p from each request's own random stream."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hisparse.engine.request import Request, SamplingParams


class Sampler:
    """Chooses one token for each request and keeps each request's random stream."""

    def __init__(self) -> None:
        self._streams: dict[int, torch.Generator] = {}

    def sample(self, logits: Tensor, requests: Sequence[Request]) -> list[int | None]:
        """A token for each row of `logits` ([b, vocab] float32); None for a row that cannot be sampled from.

        Such a row holds NaN, positive infinity, or negative infinity alone. Waits for the device once, and once more if
        not all requests are greedy.
        """
        tokens = [token if token >= 0 else None for token in _likeliest(logits).tolist()]
        sampled = [
            line
            for line, (token, request) in enumerate(zip(tokens, requests, strict=True))
            if token is not None and request.params.temperature > 0
        ]
        if sampled:
            for line, row in zip(sampled, logits[sampled].cpu(), strict=True):
                tokens[line] = self._draw(row, requests[line])
        return tokens

    def forget(self, request: Request) -> None:
        """Drop the random stream of a request that ended."""
        self._streams.pop(request.id, None)

    def _draw(self, logits: Tensor, request: Request) -> int:
        probabilities = _restrict(logits, request.params).softmax(dim=-1)
        return int(torch.multinomial(probabilities, 1, generator=self._stream(request)))

    def _stream(self, request: Request) -> torch.Generator:
        if request.id not in self._streams:
            stream = torch.Generator()
            if request.params.seed is None:
                stream.seed()
            else:
                stream.manual_seed(request.params.seed)
            self._streams[request.id] = stream
        return self._streams[request.id]


def _likeliest(logits: Tensor) -> Tensor:
    """The first of each row's largest, int64 [b]; -1 for a row whose largest is no finite number (NaN is largest)."""
    if logits.device.type == "cpu":
        tokens = torch.from_numpy(logits.numpy().argmax(axis=-1))  # a quarter of the time of torch's
        largest = logits.gather(-1, tokens[:, None])[:, 0]
    else:
        largest, tokens = logits.max(dim=-1)
    return tokens.masked_fill(~largest.isfinite(), -1)


def _restrict(logits: Tensor, params: SamplingParams) -> Tensor:
    """Logits ([vocab], on the CPU) over temperature, -inf for every token that top-k and top-p leave out."""
    logits = logits.double()
    scaled = (logits - logits.max()) / params.temperature  # the likeliest is 0, so that nothing overflows
    if 0 < params.top_k < len(scaled):
        scaled = _keep(scaled, _top_k(scaled, params.top_k))
    return scaled if params.top_p == 1 else _keep(scaled, _top_p(scaled, params.top_p))


def _top_k(scaled: Tensor, k: int) -> Tensor:
    """The k likeliest tokens; of equals, the first."""
    least = scaled.topk(k).values[-1]
    more, equal = (scaled > least).nonzero()[:, 0], (scaled == least).nonzero()[:, 0]
    return torch.cat((more, equal[: k - len(more)]))


def _top_p(scaled: Tensor, p: float) -> Tensor:
    """The fewest likeliest tokens that have the probability p together; of equals, the first."""
    probabilities = scaled.softmax(dim=-1)
    # all tokens below (1 - p) / vocab have less than 1 - p together; the others are few, and soon sorted
    tokens = (probabilities >= (1 - p) / 2 / len(scaled)).nonzero()[:, 0]
    ordered, order = probabilities[tokens].sort(descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered  # of all likelier tokens
    return tokens[order[before < p]]


def _keep(scaled: Tensor, tokens: Tensor) -> Tensor:
    return torch.full_like(scaled, -torch.inf).scatter_(0, tokens, scaled[tokens])
