"""Attention over a part of the positions, and how two parts merge into one.

Both the sparse and the tiled attention are made of it. Everything is computed in float32 on contiguous
operands, so that a result depends on the values and shapes alone and not on where they came from.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Partial(NamedTuple):
    """Attention over some positions. With no position at all, `out` is 0 and `lse` is -inf."""

    out: Tensor  # [..., heads, n, head_dim] float32, weighted by the softmax over these positions alone
    lse: Tensor  # [..., heads, n] float32, log of the sum of exponentials


def attend_part(
    query: Tensor,  # [..., num_kv_heads, n, head_dim]; the query heads of a KV head lie in n
    key: Tensor,  # [..., num_kv_heads, m, head_dim]
    value: Tensor,  # [..., num_kv_heads, m, head_dim]
    scale: float,
    hidden: Tensor | None = None,  # bool, broadcastable to [..., num_kv_heads, n, m]: positions not to read
) -> Partial:
    """Softmax attention over m positions."""
    key, value = key.float().contiguous(), value.float().contiguous()
    scores = (query.float() * scale).contiguous() @ key.transpose(-1, -2)
    if hidden is not None:
        scores = scores.masked_fill_(hidden, -torch.inf)
    top = scores.amax(dim=-1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)
    weights = scores.sub_(top).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    out = (weights @ value) / total.clamp(min=torch.finfo(scores.dtype).tiny)
    return Partial(out, (top + total.log()).squeeze(-1))


def merge(first: Partial, second: Partial) -> Partial:
    """Attention over the positions of both parts; empty, if both are."""
    lse = torch.logaddexp(first.lse, second.lse)
    finite = lse.clamp(min=torch.finfo(lse.dtype).min)  # -inf - -inf would be NaN
    weight_first = (first.lse - finite).exp_().unsqueeze(-1)
    weight_second = (second.lse - finite).exp_().unsqueeze(-1)
    return Partial(first.out * weight_first + second.out * weight_second, lse)
