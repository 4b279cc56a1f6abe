"""Log-probabilities of tokens: of the one that was chosen, and of the likeliest ones in its place.

They are the model's own, before temperature, top-k and top-p.
"""

from typing import NamedTuple

from torch import Tensor

LEAST = -9999.0  # stands for anything below it, minus infinity too, which JSON does not have


class TokenLogprob(NamedTuple):
    """A token and its log-probability."""

    token: int
    logprob: float


class ChosenLogprob(NamedTuple):
    """A token of an answer."""

    token: int
    logprob: float
    top: tuple[TokenLogprob, ...]  # the likeliest tokens, the likeliest first
    offset: int  # where its text begins, in characters of the answer's


def chosen_logprob(logits: Tensor, token: int, num_top: int, offset: int) -> ChosenLogprob:
    """What the logits ([vocab]) say about a token and the `num_top` likeliest."""
    logprobs = logits.double().log_softmax(dim=-1)
    values, tokens = logprobs.topk(min(num_top, len(logprobs)))
    likeliest = zip(tokens.tolist(), values.tolist(), strict=True)
    top = tuple(TokenLogprob(one, max(value, LEAST)) for one, value in likeliest)
    return ChosenLogprob(token, max(float(logprobs[token]), LEAST), top, offset)
