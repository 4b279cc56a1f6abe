"""The machine that is planned for, and how attention is spread over its GPUs.

Every GPU has a cache of its own with an equal part of the host's memory. With data-parallel attention (dp) each GPU
attends for requests of its own. With tensor-parallel attention (tp) every GPU attends for all requests: with its part
of the KV heads in grouped-query attention, and with all of every record in latent attention, which has one for all
heads and so is there once a GPU.
"""

from dataclasses import dataclass

from hisparse.plan.planned_model import PlannedModel
from hisparse.plan.weights import WeightBytes

ATTENTION = ("auto", "dp", "tp")
MOST_GPUS = 4096
GB = 10**9


@dataclass(frozen=True)
class Machine:
    """What there is.

    Args:
        device_memory: bytes of one GPU.
        host_memory: bytes that the host pools of all GPUs may take.
        gpus: how many.
        memory_fraction: the share of a GPU's memory for weights and cache; the rest is for activations and graphs.
        data_parallel: whether each GPU attends for requests of its own.
        link: of each GPU to the host's memory, bytes a second.

    Raises:
        ValueError: a value that cannot be.
    """

    device_memory: int
    host_memory: int
    gpus: int = 1
    memory_fraction: float = 0.95
    data_parallel: bool = True
    link: float = 53.0 * GB

    def __post_init__(self) -> None:
        if not 1 <= self.gpus <= MOST_GPUS:
            raise ValueError(f"--gpus must be from 1 to {MOST_GPUS}, got {self.gpus}")
        if not 0 < self.memory_fraction <= 1:
            raise ValueError(f"--memory-fraction must be above 0 and at most 1, got {self.memory_fraction}")
        if not 0 < self.link < float("inf"):
            raise ValueError(f"--link must be a finite number of GB/s above 0, got {self.link / GB:g}")

    @property
    def usable_bytes(self) -> int:
        """Of one GPU, for weights and cache."""
        return int(self.device_memory * self.memory_fraction)

    @property
    def host_bytes_per_gpu(self) -> int:
        """For one GPU's host pool."""
        return self.host_memory // self.gpus

    @property
    def attention_shares(self) -> int:
        """Parts that the KV heads are divided into."""
        return 1 if self.data_parallel else self.gpus

    @property
    def independent_caches(self) -> int:
        """Caches that hold different requests."""
        return self.gpus if self.data_parallel else 1

    def weight_bytes_per_gpu(self, weights: WeightBytes) -> int:
        """Weights on each GPU."""
        return weights.per_gpu(self.gpus, data_parallel=self.data_parallel)

    def cache_bytes_per_gpu(self, weights: WeightBytes) -> int:
        """What weights leave of a GPU's usable memory; negative where they do not fit."""
        return self.usable_bytes - self.weight_bytes_per_gpu(weights)


def is_data_parallel(attention: str, model: PlannedModel, gpus: int) -> bool:
    """What `--attention` comes to: by default dp for latent attention, tp where the KV heads can be shared out.

    Raises `ValueError` for a word that is none of them.
    """
    if attention not in ATTENTION:
        raise ValueError(f"--attention must be one of {', '.join(ATTENTION)}, got {attention!r}")
    if attention != "auto":
        return attention == "dp"
    return model.is_latent or not model.can_share(gpus)
