"""Log-probabilities of tokens, from logits made by hand."""

import math

import pytest
import torch

from hisparse.engine.logprobs import LEAST, chosen_logprob


def test_a_token_and_the_likeliest() -> None:
    logits = torch.tensor([0.0, math.log(3.0), -torch.inf, math.log(4.0)])
    one = chosen_logprob(logits, 0, num_top=2, offset=7)
    assert (one.token, one.offset) == (0, 7)
    assert one.logprob == pytest.approx(math.log(1 / 8))
    assert [top.token for top in one.top] == [3, 1]
    assert [top.logprob for top in one.top] == pytest.approx([math.log(4 / 8), math.log(3 / 8)])


def test_what_json_does_not_have_is_the_least() -> None:
    logits = torch.tensor([0.0, -torch.inf, -1e30])
    assert chosen_logprob(logits, 1, num_top=5, offset=0).logprob == LEAST
    assert [top.logprob for top in chosen_logprob(logits, 0, num_top=5, offset=0).top] == [0.0, LEAST, LEAST]
