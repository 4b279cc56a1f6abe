"""Logits to tokens: greedy, or sampled by temperature, top-k and top-p from each request's own random stream."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hisparse.engine.request import Request, SamplingParams
from hisparse.errors import ModelOutputError


class Sampler:
    """Chooses one token for each request and keeps each request's random stream."""

    def __init__(self) -> None:
        self._streams: dict[int, torch.Generator] = {}

    def sample(self, logits: Tensor, requests: Sequence[Request]) -> list[int]:
        """A token for each row of `logits` ([b, vocab] float32).

        Raises `ModelOutputError`, naming the request, if a row holds NaN or nothing that can be sampled.
        """
        _check_logits(logits, requests)
        return [self._sample_row(row, request) for row, request in zip(logits, requests, strict=True)]

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
    scaled = logits.cpu().double() / params.temperature
    ordered, tokens = scaled.sort(descending=True, stable=True)
    if params.top_k:
        ordered[params.top_k :] = -torch.inf
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities  # of all likelier tokens
    ordered[(before >= params.top_p) & (before > 0)] = -torch.inf
    return torch.full_like(scaled, -torch.inf).scatter_(0, tokens, ordered)


def _check_logits(logits: Tensor, requests: Sequence[Request]) -> None:
    bad = logits.isnan().any(dim=-1) | (logits.amax(dim=-1) == -torch.inf) | (logits == torch.inf).any(dim=-1)
    if bad.any():
        request = requests[int(bad.nonzero()[0])]
        position = len(request.prompt) + len(request.output)
        raise ModelOutputError(
            f"the model produced NaN or infinite logits for request {request.id} at position {position}: "
            f"the checkpoint is damaged, or its dtype overflows (try --dtype float32)"
        )
