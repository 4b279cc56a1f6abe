"""The simplest `LatentAttention`: one request, everything resident, selections as masks.

Two correct implementations select differently where scores are closer than they round. `clear_tokens` finds
tokens for which no score is that close to the last selected one.
"""

import torch
from torch import Tensor

from hisparse.checkpoint.tiny import VOCAB_SIZE
from hisparse.models.attend_latent import IndexInputs
from hisparse.models.sparse_mla import SparseMla
from hisparse.models.sparse_mla_config import SparseMlaConfig

CLEAR = 1e-5  # ten times what float32 rounds in these scores


class ResidentLatents:
    """Causal attention over the `top_k` best-scored positions, the lower position first where scores tie."""

    def __init__(self, config: SparseMlaConfig, top_k: int | None = None) -> None:
        self.config = config
        self.top_k = top_k or config.index_top_k
        self.records: list[list[Tensor]] = [[] for _ in range(config.num_layers)]
        self.keys: list[list[Tensor]] = [[] for _ in range(config.num_layers)]
        self.selected: dict[int, Tensor] = {}  # anchor -> [t, history] bool
        self.closest = float("inf")  # the smallest distance yet between a last selected and a first dropped score

    def begin(self, layer: int, latent: Tensor, index: IndexInputs | None) -> None:
        assert latent.shape[1] == self.config.record_dim
        assert (index is not None) == self.config.has_indexer[layer]
        self.records[layer].append(latent)
        if index is not None:
            self.keys[layer].append(index.key)
            self.selected[layer] = self._select(index, torch.cat(self.keys[layer]))

    def attend(self, layer: int, query: Tensor) -> Tensor:
        records = torch.cat(self.records[layer])
        scores = torch.einsum("thc,nc->thn", query, records).float() * self.config.attention_scale
        selected = self.selected[self.config.anchors[layer]][:, None]
        weights = scores.masked_fill(~selected, float("-inf")).softmax(dim=-1).to(query.dtype)
        return torch.einsum("thn,nc->thc", weights, records[:, : self.config.kv_lora_rank])

    def _select(self, index: IndexInputs, keys: Tensor) -> Tensor:
        assert index.weights.dtype == torch.float32
        products = torch.einsum("thd,nd->thn", index.query.float(), keys.float()).relu()
        scores = torch.einsum("thn,th->tn", products, index.weights)
        num_new, num_all = scores.shape
        causal = torch.ones(num_new, num_all, dtype=torch.bool).tril(num_all - num_new)
        values, best = scores.masked_fill(~causal, float("-inf")).sort(dim=-1, descending=True, stable=True)
        if self.top_k < num_all:
            distance = values[:, self.top_k - 1] - values[:, self.top_k]
            self.closest = min(self.closest, float(distance[causal.sum(1) > self.top_k].min()))
        chosen = torch.zeros_like(causal).scatter_(1, best[:, : self.top_k], True)
        return chosen & causal


def clear_tokens(model: SparseMla, count: int, num_tries: int = 40) -> Tensor:
    """Random tokens [count] int64 for which no other selection would be right too."""
    for seed in range(num_tries):
        tokens = torch.randint(VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed))
        attention = ResidentLatents(model.config)
        model.forward(tokens, torch.arange(count), attention)
        if attention.closest > CLEAR:
            return tokens
    raise AssertionError(f"{num_tries} token sequences all have scores that tie at the selection's edge")
