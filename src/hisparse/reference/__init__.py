"""The executable specification of every operation on the device pool, in vectorised torch.

Tensors in, tensors out, one file an operation, and no loop over positions. It is also the backend that runs
on a CPU. The GPU backend (kernels/) has an operation of the same name for each, with this as its oracle.
"""

from hisparse.reference.insert import insert
from hisparse.reference.rebuild_order import rebuild_order
from hisparse.reference.release import release
from hisparse.reference.replay import replay
from hisparse.reference.resolve import Resolved, resolve
from hisparse.reference.stage import stage
from hisparse.reference.write_through import write_through

__all__ = ["Resolved", "insert", "rebuild_order", "release", "replay", "resolve", "stage", "write_through"]
