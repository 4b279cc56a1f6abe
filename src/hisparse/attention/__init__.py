"""Attention over records: sparse over slots for decoding, tiled over a history for prefill."""

from hisparse.attention.grouped_records import GroupedRecords
from hisparse.attention.latent_records import LatentRecords
from hisparse.attention.latent_sparse import Attended, attend_latent, attend_latent_part
from hisparse.attention.latent_tiled import attend_latent_tiled
from hisparse.attention.partial import Partial, merge
from hisparse.attention.sparse import attend
from hisparse.attention.tiled import attend_tiled

__all__ = [
    "Attended",
    "GroupedRecords",
    "LatentRecords",
    "Partial",
    "attend",
    "attend_latent",
    "attend_latent_part",
    "attend_latent_tiled",
    "attend_tiled",
    "merge",
]
