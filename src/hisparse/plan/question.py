"""What is asked: a model on a machine, for requests of one length. Made here from what people write, and checked."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hisparse.config import HiSparseConfig
from hisparse.engine.family import Family
from hisparse.order import POLICIES
from hisparse.plan.footprint import Footprint, footprint, resident_bytes
from hisparse.plan.machine import GB, Machine, is_data_parallel
from hisparse.plan.misses import MissCurve, calibrated
from hisparse.plan.planned_model import PlannedModel, read_model
from hisparse.plan.quantities import parse_bytes, parse_tokens
from hisparse.plan.trace_curve import curve_of_trace
from hisparse.plan.weights import WeightBytes, weight_bytes

RESERVATIONS = (2, 3, 4)  # of top_k: the paper's useful range, its section 4.4
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHORTEST = 2  # tokens


@dataclass(frozen=True)
class Question:
    """What is asked."""

    model: PlannedModel
    family: Family  # of one GPU's share
    weights: WeightBytes
    machine: Machine
    config: HiSparseConfig
    context: int  # positions of a request, prompt and answer
    curve: MissCurve
    step_budget_ms: float  # of the link, a step

    @property
    def cache_bytes(self) -> int:
        """Of one GPU, beside the weights; negative where these do not fit."""
        return self.machine.cache_bytes_per_gpu(self.weights)

    @property
    def heated(self) -> bool:
        """Whether the configuration's policy ranks by heat, which the cache then keeps for every row."""
        return POLICIES[self.config.policy].heated

    @property
    def resident_requests_per_gpu(self) -> int:
        """Requests that fit with all their records on the device."""
        return max(self.cache_bytes, 0) // resident_bytes(self.family, self.context)

    def footprint(self, num_requests: int, device_buffer_size: int) -> Footprint:
        """What one GPU's cache of so many requests takes."""
        return footprint(self.family, self.context, num_requests, device_buffer_size, heated=self.heated)

    def family_on(self, machine: Machine) -> Family | None:
        """How a GPU of another machine attends; None where the KV heads cannot be divided so."""
        if not self.model.can_share(machine.attention_shares):
            return None
        return self.model.family(self.config, machine.attention_shares)

    def with_fp8_index_keys(self) -> "Question | None":
        """The same with index keys in FP8; None where they are already, or cannot be."""
        if self.config.index_cache_dtype == "fp8" or not self.model.can_keep_fp8_index_keys:
            return None
        config = replace(self.config, index_cache_dtype="fp8")
        return replace(self, config=config, family=self.model.family(config, self.machine.attention_shares))

    @property
    def reservations(self) -> tuple[int, ...]:
        """The B to look at: the configuration's, or multiples of top_k."""
        own = self.config.device_buffer_size
        return (own,) if own else tuple(ratio * self.family.top_k for ratio in RESERVATIONS)


def ask(
    model: str,
    config: HiSparseConfig,
    *,
    device_memory: str,
    host_memory: str,
    context: str | None = None,
    gpus: int = 1,
    attention: str = "auto",
    link: float = 53.0,
    step_budget: float = 30.0,
    memory_fraction: float = 0.95,
    weight_memory: str | None = None,
    dtype: str = "bfloat16",
    trace: Path | None = None,
) -> Question:
    """The question that `hisparse plan` puts; its options say what the arguments mean.

    Raises:
        CheckpointError: a model that is not there or not supported.
        ValueError: any other argument that cannot be, with what is accepted.
    """
    _check(config, step_budget, dtype)
    planned = read_model(model, DTYPES[dtype])
    machine = Machine(
        device_memory=parse_bytes("--device-memory", device_memory),
        host_memory=parse_bytes("--host-memory", host_memory),
        gpus=gpus,
        memory_fraction=memory_fraction,
        data_parallel=is_data_parallel(attention, planned, gpus),
        link=link * GB,
    )
    return Question(
        model=planned,
        family=planned.family(config, machine.attention_shares),
        weights=_weights(planned, weight_memory),
        machine=machine,
        config=config,
        context=_context(planned, context, config),
        curve=calibrated(config.policy) if trace is None else curve_of_trace(trace, config.policy, RESERVATIONS),
        step_budget_ms=step_budget,
    )


def _check(config: HiSparseConfig, step_budget: float, dtype: str) -> None:
    if config.host_to_device_ratio is not None:
        raise ValueError(
            "host_to_device_ratio is what the plan finds out: leave it out, --host-memory says what there is"
        )
    if not 0 < step_budget < float("inf"):
        raise ValueError(f"--step-budget must be a finite number of milliseconds above 0, got {step_budget}")
    if dtype not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")


def _weights(model: PlannedModel, weight_memory: str | None) -> WeightBytes:
    weights = weight_bytes(model)
    return weights if weight_memory is None else weights.scaled_to(parse_bytes("--weight-memory", weight_memory))


def _context(model: PlannedModel, text: str | None, config: HiSparseConfig) -> int:
    most = model.config.max_positions
    context = most if text is None else parse_tokens("--context", text)
    if context < SHORTEST:
        raise ValueError(f"--context must be at least {SHORTEST}, a token and its answer, got {context}")
    if context > most:
        raise ValueError(
            f"--context {context:,} is beyond the {most:,} tokens that {model.name} can read: "
            f"use --context {most} or less"
        )
    if config.selector == "all" and context > config.top_k_for(None):
        raise ValueError(
            f"the selector 'all' reads every position: --top-k must be the context, {context}, "
            f"got {config.top_k_for(None)}"
        )
    return context
