"""Selection traces: what layers selected at every step, kept in files, replayed under policies, and drawn."""

from hisparse.trace.read import open_trace
from hisparse.trace.trace import Trace

__all__ = ["Trace", "open_trace"]
