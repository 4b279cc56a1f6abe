"""Attention over records: sparse over slots for decoding, tiled over a history for prefill."""

from hisparse.attention.grouped_records import GroupedRecords
from hisparse.attention.partial import Partial
from hisparse.attention.sparse import attend
from hisparse.attention.tiled import attend_tiled

__all__ = ["GroupedRecords", "Partial", "attend", "attend_tiled"]
