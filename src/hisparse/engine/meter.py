"""What a run used and how fast it was: an observer of the engine, read once at the end."""

import time
from dataclasses import dataclass, field

from torch import Tensor

from hisparse.cache import HierarchicalCache
from hisparse.engine.batch import Batch, PrefillChunk
from hisparse.order import POLICIES


@dataclass
class Meter:
    """Counts tokens and seconds, and remembers the largest footprint. Observes an engine over `cache`."""

    cache: HierarchicalCache
    policy: str = "lru"  # the cache's
    prompt_tokens: int = 0
    decoded_tokens: int = 0  # by decode steps: the first token of each request comes with its prompt
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    longest_context: int = 0
    peak_positions: int = 0  # of all requests at one time
    peak_state_bytes: int = 0
    _since: float = field(default_factory=time.perf_counter)

    def start(self) -> None:
        """The next forward begins now."""
        self._since = time.perf_counter()

    def ran(self, batch: Batch, logits: Tensor | None) -> None:
        """Count one forward."""
        seconds = time.perf_counter() - self._since
        if isinstance(batch, PrefillChunk):
            self.prompt_tokens += len(batch.tokens)
            self.prefill_seconds += seconds
        else:
            self.decoded_tokens += len(batch.tokens)
            self.decode_seconds += seconds
        lengths = [request.length for request in self.cache.requests]
        self.longest_context = max(self.longest_context, *lengths)
        self.peak_positions = max(self.peak_positions, sum(lengths))
        if self.cache.selection_state is not None:
            self.peak_state_bytes = max(self.peak_state_bytes, self.cache.selection_state.used_bytes)
        self.start()  # a step may have several forwards

    def finished(self, request_id: int) -> None:
        """Nothing to do: the peak is already counted."""

    def summary(self) -> dict[str, int | float]:
        """The figures that commands print, by name; bytes, tokens, seconds and shares."""
        layout, counts = self.cache.layout, self.cache.statistics()
        return {
            "top_k": layout.top_k,
            "device_buffer_size": layout.device_buffer_size,
            "context_length": self.longest_context,
            "prompt_tokens": self.prompt_tokens,
            "decoded_tokens": self.decoded_tokens,
            "device_kv_bytes": layout.device_kv_bytes,
            "slots_bytes": layout.slots_bytes,
            "workspace_bytes": layout.workspace_bytes,
            "table_bytes": layout.table_bytes,
            "heat_bytes": layout.heat_bytes if POLICIES[self.policy].heated else 0,
            "selection_state_bytes": self.peak_state_bytes,
            "full_kv_bytes": layout.full_kv_bytes(self.peak_positions),
            "hit_rate": 1 - counts.miss_rate,
            "miss_rate": counts.miss_rate,
            "fetched_bytes": counts.fetched_bytes,
            "fetched_bytes_per_token": counts.fetched_bytes / max(self.decoded_tokens, 1),
            "prefill_tokens_per_second": self.prompt_tokens / max(self.prefill_seconds, 1e-9),
            "tokens_per_second": self.decoded_tokens / max(self.decode_seconds, 1e-9),
        }
