"""The decoder of DeepSeek-V3.2 and GLM-5: latent attention over selected positions, and routed experts.

Like `llama.py` it knows nothing of caches: for each layer it hands over a record and its indexer's inputs, and
later an absorbed query (attend_latent.py says when and why). Attention is absorbed everywhere, in prefill too:
heads meet in latent space, so the history is read as it is stored and never expanded.

Sources: DeepSeek-V2 (arXiv 2405.04434, section 2.1) for latent attention and absorption, DeepSeek-V3.2 for the
indexer, and transformers' deepseek_v32 and glm_moe_dsa, which tests hold the logits against.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from hisparse.models.attend_latent import IndexInputs, LatentAttention
from hisparse.models.inputs import check_ids
from hisparse.models.rope import cosines_and_sines, inverse_frequencies, rotate
from hisparse.models.sparse_mla_config import SparseMlaConfig
from hisparse.models.sparse_mla_weights import Indexer, Layer, Target, Weights, take_layer

LOW_RANK_EPS = 1e-6  # of the norms inside attention, whatever rms_norm_eps says, as in transformers


class SparseMla:
    """A decoder with its weights on one device, in one dtype; routers and indexers' head weights are float32."""

    def __init__(
        self,
        config: SparseMlaConfig,
        weights: Weights,  # in the naming of `weight_shapes`; emptied, so that none is held twice
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = torch.device(device)
        target = Target(dtype, self.device)
        self.embedding = target.take(weights, "model.embed_tokens.weight")  # [vocab, hidden]
        self.layers = [take_layer(weights, config, index, target) for index in range(config.num_layers)]
        self.final_norm = target.take(weights, "model.norm.weight")  # [hidden]
        self.head = self.embedding if config.tied_head else target.take(weights, "lm_head.weight")
        self.inverse_frequency = inverse_frequencies(config.rope, config.qk_rope_head_dim).to(self.device)

    def forward(
        self,
        tokens: Tensor,  # [t] int64
        positions: Tensor,  # [t] int64, each token's position in its own request
        attention: LatentAttention,
    ) -> Tensor:
        """The hidden states after the final norm: [t, hidden], in the model's dtype."""
        check_ids("tokens", tokens, tokens)
        check_ids("positions", positions, tokens)
        rope = cosines_and_sines(self.inverse_frequency, positions, self.config.rope.attention_factor, self.dtype)
        eps = self.config.rms_norm_eps
        hidden = F.embedding(tokens, self.embedding)
        for index, layer in enumerate(self.layers):
            hidden = hidden + self._attend(index, layer, _norm(hidden, layer.attention_norm, eps), rope, attention)
            hidden = hidden + layer.mlp(_norm(hidden, layer.mlp_norm, eps))
        return _norm(hidden, self.final_norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] from `forward` -> [n, vocab] float32."""
        return F.linear(hidden, self.head).float()

    def _attend(
        self,
        index: int,
        layer: Layer,
        normed: Tensor,  # [t, hidden]
        rope: tuple[Tensor, Tensor],
        attention: LatentAttention,
    ) -> Tensor:
        config = self.config
        sizes = (config.q_lora_rank, config.kv_lora_rank, config.qk_rope_head_dim)
        low_rank, latent, key_rope = layer.down(normed).split(sizes, dim=-1)
        low_rank = _norm(low_rank, layer.query_norm, LOW_RANK_EPS)
        record = torch.cat((_norm(latent, layer.latent_norm, LOW_RANK_EPS), _rotate_flat(key_rope, rope)), dim=-1)
        inputs = None if layer.indexer is None else self._index_inputs(layer.indexer, normed, low_rank, rope)
        attention.begin(index, record, inputs)
        attended = attention.attend(index, self._absorbed_query(layer, low_rank, rope))
        values = torch.einsum("thc,hcv->thv", attended, layer.value_up)
        return layer.output(values.flatten(1))

    def _index_inputs(
        self, indexer: Indexer, normed: Tensor, low_rank: Tensor, rope: tuple[Tensor, Tensor]
    ) -> IndexInputs:
        rotated, head_dim = self.config.qk_rope_head_dim, self.config.index_head_dim
        query = F.linear(low_rank, indexer.query).unflatten(-1, (-1, head_dim))
        key = F.linear(normed, indexer.key)
        key = F.layer_norm(key, (head_dim,), indexer.key_norm, indexer.key_norm_bias, LOW_RANK_EPS)
        return IndexInputs(
            query=torch.cat((rotate(query[..., :rotated], *rope), query[..., rotated:]), dim=-1),
            key=torch.cat((_rotate_flat(key[:, :rotated], rope), key[:, rotated:]), dim=-1),
            weights=F.linear(normed.float(), indexer.head_weights),
        )

    def _absorbed_query(self, layer: Layer, low_rank: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """[t, num_heads, kv_lora_rank + qk_rope_head_dim]: what scores records as they are stored."""
        query = F.linear(low_rank, layer.query_up).unflatten(-1, (self.config.num_heads, -1))
        plain, rotated = query.split((self.config.qk_nope_head_dim, self.config.qk_rope_head_dim), dim=-1)
        return torch.cat((torch.einsum("thn,hnc->thc", plain, layer.absorb), rotate(rotated, *rope)), dim=-1)


def _rotate_flat(vectors: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate [t, head_dim], which all heads share."""
    return rotate(vectors[:, None], *rope)[:, 0]


def _norm(vectors: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension in float32, rounded before the weight as in transformers."""
    exact = vectors.float()
    return weight * (exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)).to(vectors.dtype)
