"""What a model asks of its caller: attention over everything that came before.

A decoder here knows nothing of caches, batches, prefill or decode. For each layer it hands over query, key
and value, and gets the attention output back. The engine implements `Attend` on the hierarchical cache, the
resident run on one contiguous tensor, and tests on plain matrices.
"""

from typing import Protocol

from torch import Tensor


class Attend(Protocol):
    """Stores key and value of the tokens of one layer, and attends over the history with their queries."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend in one layer; called once a layer, in ascending order.

        query:  [t, num_heads, head_dim]     after norms and rope; may be a strided view, like key and value
        key:    [t, num_kv_heads, head_dim]  after norms and rope
        value:  [t, num_kv_heads, head_dim]
        returns [t, num_heads, head_dim], same dtype and device
        """
        ...
