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

        Such a row holds NaN, positive infinity, or negative infinity alone.
        """
        bad = logits.isnan().any(dim=-1) | (logits.amax(dim=-1).abs() == torch.inf)
        return [
            None if is_bad else self._sample_row(row, request)
            for row, request, is_bad in zip(logits, requests, bad.tolist(), strict=True)
        ]

    def forget(self, request: Request) -> None:
        """Drop the random stream of a request that ended."""
        self._streams.pop(request.id, None)

    def _sample_row(self, logits: Tensor, request: Request) -> int:
        params = request.params
        if params.temperature == 0:
            return int(logits.argmax())
        probabilities = _restrict(logits, params).softmax(dim=-1)
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


def _restrict(logits: Tensor, params: SamplingParams) -> Tensor:
    """Logits over temperature, -inf for every token that top-k and top-p leave out; on the CPU."""
    logits = logits.cpu().double()
    scaled = (logits - logits.max()) / params.temperature  # the likeliest is 0, so that nothing overflows
    ordered, tokens = scaled.sort(descending=True, stable=True)
    if params.top_k:
        ordered[params.top_k :] = -torch.inf
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities  # of all likelier tokens
    ordered[(before >= params.top_p) & (before > 0)] = -torch.inf
    return torch.full_like(scaled, -torch.inf).scatter_(0, tokens, ordered)
