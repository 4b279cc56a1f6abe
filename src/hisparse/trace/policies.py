"""All policies of the simulator, by name."""

from hisparse.trace.belady import Belady
from hisparse.trace.frequency import LFU, LRFU, LRU2, LRFUResident
from hisparse.trace.order_policies import LRU, Fifo, PaperLRU, Random, TwoRate, TwoRateTier
from hisparse.trace.policy import SimulatedPolicy
from hisparse.trace.queues import Clock, S3Fifo, Sieve
from hisparse.trace.two_rate_resident import TwoRateResident, TwoRateResidentTier

SIMULATED: dict[str, type[SimulatedPolicy]] = {
    "lru": LRU,
    "lru_paper": PaperLRU,
    "fifo": Fifo,
    "random": Random,
    "clock": Clock,
    "sieve": Sieve,
    "s3_fifo": S3Fifo,
    "lfu": LFU,
    "lru_2": LRU2,
    "lrfu": LRFU,
    "lrfu_resident": LRFUResident,
    "two_rate": TwoRate,
    "two_rate_tier": TwoRateTier,
    "two_rate_resident": TwoRateResident,
    "two_rate_resident_tier": TwoRateResidentTier,
    "belady": Belady,
}
