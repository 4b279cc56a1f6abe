"""Drive the cache without any engine: 30 lines that an engine author can start from.

Two requests, four layers, records of any bytes; a selection is whatever your selector says.
Run: python examples/drive_the_cache.py
"""

import torch

from hisparse import CacheLayout, HierarchicalCache
from hisparse.layout import num_pages_for

LAYERS, RECORD_BYTES, TOP_K, PROMPT, STEPS = 4, 1152, 64, 1000, 50


def random_records(count: int) -> torch.Tensor:
    """Stands for a model's KV: uint8 [count, record_bytes]."""
    return torch.randint(0, 256, (count, RECORD_BYTES), dtype=torch.uint8)


def select(lengths: torch.Tensor) -> torch.Tensor:
    """Stands for a selector: distinct positions, ascending, int32 [b, k]."""
    rows = [torch.randperm(int(length))[:TOP_K].sort().values for length in lengths]
    return torch.stack(rows).int()


cache = HierarchicalCache(
    CacheLayout(
        num_layers=LAYERS,
        record_bytes=RECORD_BYTES,
        top_k=TOP_K,
        device_buffer_size=2 * TOP_K,
        max_requests=2,
        num_pages=2 * num_pages_for(PROMPT + STEPS),
    )
)
requests = [cache.admit(PROMPT + STEPS) for _ in range(2)]
for request in requests:
    for layer in range(LAYERS):
        cache.stage(layer, request, start=0, records=random_records(PROMPT))

for _ in range(STEPS):
    with cache.step(requests) as step:
        for layer in range(LAYERS):
            cache.append(layer, random_records(len(requests)))
            slots = cache.resolve(layer, select(step.lengths))  # int32 [b, k]
            selected = cache.records(layer)[slots]  # your attention kernel reads these in place

print(cache.statistics(), f"{cache.layout.device_kv_bytes / cache.layout.full_kv_bytes(2 * (PROMPT + STEPS)):.0%}")
for request in requests:
    cache.retire(request)
cache.check_integrity()
