"""What can go wrong that is not a caller's mistake; a caller's mistake is a `ValueError`.

Every message names the value, what was expected, and the way out.
"""


class HiSparseError(Exception):
    """The base of every error that this package raises on its own account."""


class CapacityError(HiSparseError):
    """There is no room now; it may come when other requests finish. Nothing was changed."""


class NeverFitsError(CapacityError):
    """There would be no room even in an empty cache: waiting does not help."""


class HostMemoryError(CapacityError):
    """The machine does not have the host memory that a host pool asks for, or cannot pin it."""


class DeviceMemoryError(CapacityError):
    """The device does not have the memory that a device pool asks for."""


class CheckpointError(HiSparseError):
    """A checkpoint is missing, truncated, inconsistent, or of a kind that is not supported."""


class ModelOutputError(HiSparseError):
    """A model produced something that cannot be sampled from, such as NaN logits."""


class IntegrityError(HiSparseError):
    """The cache's tables contradict each other. This is a defect in hisparse; please report it."""
