"""What a model with latent attention asks of its caller: a selection as early as can be, attention when it is due.

In multi-head latent attention all heads read one record a position: the normed latent with the rotated key
part behind it. A layer hands over its record and its indexer's inputs as soon as they exist (`begin`), so that
scores, top-k, resolve and the fetch of misses run under the query up-projection, and asks for the result
afterwards (`attend`). The engine implements it on the hierarchical cache, tests on plain tensors.
"""

from typing import NamedTuple, Protocol

from torch import Tensor


class IndexInputs(NamedTuple):
    """What an indexer scores with: score = sum over heads of weights * relu(query . key)."""

    query: Tensor  # [t, num_index_heads, index_head_dim] after rope, in the model's dtype
    key: Tensor  # [t, index_head_dim] after norm and rope, in the model's dtype; the part that is kept
    weights: Tensor  # [t, num_index_heads] float32, with every constant folded in; may be negative


class LatentAttention(Protocol):
    """Stores the records of one layer's tokens, selects, and attends over what was selected."""

    def begin(self, layer: int, latent: Tensor, index: IndexInputs | None) -> None:
        """Take in one layer's new records and start on the selection; called once a layer, in ascending order.

        latent: [t, kv_lora_rank + qk_rope_head_dim], the record of each token; may be a strided view
        index:  what to select with, or None in a layer that uses its anchor's selection
        """
        ...

    def attend(self, layer: int, query: Tensor) -> Tensor:
        """Attend in the layer of the last `begin`, scores scaled by the configuration's `attention_scale`.

        query:  [t, num_heads, kv_lora_rank + qk_rope_head_dim], absorbed; may be a strided view
        returns [t, num_heads, kv_lora_rank], the weighted latents, same dtype and device
        """
        ...
