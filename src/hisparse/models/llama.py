"""The Llama decoder, which with a bias here and a norm there is also Qwen2 and Qwen3.

It exists so that every step of a forward is in view and attention is the caller's: tokens and positions come
in, `attend` is called once a layer, hidden states go out. `checkpoint/` feeds it weights; the engine's runner
calls `forward` for prefill chunks and decode steps alike, and `logits` for the rows that it samples from.

Query, key and value projections are one matrix, as are gate and up: fewer, larger products are what makes
decoding on a CPU quick, and on a GPU they are fewer launches.
"""

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hisparse.models.attend import Attend
from hisparse.models.inputs import check_ids
from hisparse.models.llama_config import LlamaConfig
from hisparse.models.rope import cosines_and_sines, inverse_frequencies, rotate

Weights = MutableMapping[str, Tensor]


class Projection(NamedTuple):
    """A matrix and, on some checkpoints, a bias."""

    weight: Tensor  # [outputs, inputs]
    bias: Tensor | None  # [outputs]

    def __call__(self, inputs: Tensor) -> Tensor:
        """[t, inputs] -> [t, outputs]."""
        return F.linear(inputs, self.weight, self.bias)


@dataclass(frozen=True)
class Layer:
    """The weights of one layer."""

    attention_norm: Tensor  # [hidden]
    qkv: Projection  # hidden -> (num_heads + 2 * num_kv_heads) * head_dim
    qk_norm: Tensor | None  # [num_heads + num_kv_heads, head_dim], the query norm's rows before the key norm's
    output: Projection  # num_heads * head_dim -> hidden
    mlp_norm: Tensor  # [hidden]
    gate_up: Projection  # hidden -> 2 * intermediate
    down: Projection  # intermediate -> hidden


class Llama:
    """A decoder with its weights on one device, in one dtype."""

    def __init__(
        self,
        config: LlamaConfig,
        weights: Weights,  # in transformers' naming, see `weight_shapes`; emptied, so that none is held twice
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = torch.device(device)
        self.embedding = self._take(weights, "model.embed_tokens.weight")  # [vocab, hidden]
        self.layers = [self._take_layer(weights, f"model.layers.{i}") for i in range(config.num_layers)]
        self.final_norm = self._take(weights, "model.norm.weight")  # [hidden]
        self.head = self.embedding if config.tied_head else self._take(weights, "lm_head.weight")
        self.inverse_frequency = inverse_frequencies(config.rope, config.head_dim).to(self.device)

    def forward(
        self,
        tokens: Tensor,  # [t] int64
        positions: Tensor,  # [t] int64, each token's position in its own request
        attend: Attend,
    ) -> Tensor:
        """The hidden states after the final norm: [t, hidden], in the model's dtype."""
        check_ids("tokens", tokens, tokens)
        check_ids("positions", positions, tokens)
        cosines, sines = cosines_and_sines(
            self.inverse_frequency, positions, self.config.rope.attention_factor, self.dtype
        )
        hidden = F.embedding(tokens, self.embedding)
        for index, layer in enumerate(self.layers):
            normed = self._norm(hidden, layer.attention_norm)
            query, key, value = self._query_key_value(layer, normed, cosines, sines)
            attended = attend(index, query, key, value)
            hidden = hidden + layer.output(attended.reshape(len(tokens), -1))
            hidden = hidden + self._mlp(layer, self._norm(hidden, layer.mlp_norm))
        return self._norm(hidden, self.final_norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] from `forward` -> [n, vocab] float32."""
        return F.linear(hidden, self.head).float()

    def _query_key_value(
        self, layer: Layer, normed: Tensor, cosines: Tensor, sines: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_heads, num_kv_heads = self.config.num_heads, self.config.num_kv_heads
        heads = layer.qkv(normed).view(len(normed), num_heads + 2 * num_kv_heads, self.config.head_dim)
        query_key, value = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
        if layer.qk_norm is not None:
            query_key = self._norm(query_key, layer.qk_norm)
        query_key = rotate(query_key, cosines, sines)
        return query_key[:, :num_heads], query_key[:, num_heads:], value

    def _mlp(self, layer: Layer, normed: Tensor) -> Tensor:
        gate, up = layer.gate_up(normed).chunk(2, dim=-1)
        return layer.down(F.silu(gate) * up)

    def _norm(self, vectors: Tensor, weight: Tensor) -> Tensor:
        """RMS norm over the last dimension in float32, rounded before the weight as in transformers."""
        exact = vectors.float()
        scale = torch.rsqrt(exact.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return weight * (exact * scale).to(vectors.dtype)

    def _take_layer(self, weights: Weights, prefix: str) -> Layer:
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        return Layer(
            attention_norm=self._take(weights, f"{prefix}.input_layernorm.weight"),
            qkv=self._take_projection(
                weights, [f"{attention}.{name}_proj" for name in "qkv"], bias=self.config.qkv_bias
            ),
            qk_norm=self._take_qk_norm(weights, attention) if self.config.qk_norm else None,
            output=self._take_projection(weights, [f"{attention}.o_proj"], bias=self.config.output_bias),
            mlp_norm=self._take(weights, f"{prefix}.post_attention_layernorm.weight"),
            gate_up=self._take_projection(weights, [f"{mlp}.gate_proj", f"{mlp}.up_proj"], bias=self.config.mlp_bias),
            down=self._take_projection(weights, [f"{mlp}.down_proj"], bias=self.config.mlp_bias),
        )

    def _take_projection(self, weights: Weights, names: list[str], *, bias: bool) -> Projection:
        weight = [self._take(weights, f"{name}.weight") for name in names]
        biases = [self._take(weights, f"{name}.bias") for name in names] if bias else []
        return Projection(_stack(weight), _stack(biases) if bias else None)

    def _take_qk_norm(self, weights: Weights, attention: str) -> Tensor:
        query = self._take(weights, f"{attention}.q_norm.weight")
        key = self._take(weights, f"{attention}.k_norm.weight")
        return torch.cat((query.expand(self.config.num_heads, -1), key.expand(self.config.num_kv_heads, -1)))

    def _take(self, weights: Weights, name: str) -> Tensor:
        return weights.pop(name).to(device=self.device, dtype=self.dtype)


def _stack(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
