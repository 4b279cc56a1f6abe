"""The plan: what fits on a machine, what it costs on the link, and the configuration to serve it with."""

from dataclasses import dataclass, fields
from typing import Any

from hisparse.config import HiSparseConfig
from hisparse.plan.capacity import Capacity, capacity
from hisparse.plan.footprint import Footprint
from hisparse.plan.misses import miss_rate
from hisparse.plan.question import Question


@dataclass(frozen=True)
class Option:
    """One reservation: what fits with it, and what its misses cost. Per GPU, unless it says otherwise."""

    question: Question
    device_buffer_size: int
    capacity: Capacity
    footprint: Footprint | None  # of all the requests that fit; None: not one does

    @property
    def miss_rate(self) -> float:
        """Expected misses as a share of top_k."""
        question = self.question
        return miss_rate(question.curve, question.context, question.family.top_k, self.device_buffer_size)

    @property
    def misses_per_request(self) -> float:
        """Records that a request fetches a step, in all layers."""
        return self.miss_rate * self.question.family.top_k * len(self.question.family.anchors)

    @property
    def link_ms_per_request(self) -> float:
        """Milliseconds of the link a request takes a step."""
        fetched_bytes = self.misses_per_request * self.question.family.record_bytes
        return 1e3 * fetched_bytes / self.question.machine.link

    @property
    def link_ms(self) -> float:
        """Milliseconds of the link that a step of all requests takes."""
        return self.capacity.requests * self.link_ms_per_request

    @property
    def anchor_share(self) -> float:
        """The part of the fetches that only a selection starts; the rest is known from it, and can be prefetched."""
        return len(set(self.question.family.anchors)) / len(self.question.family.anchors)

    @property
    def requests_in_budget(self) -> int:
        """Requests that fit and whose fetches stay within the step's budget."""
        if not self.link_ms_per_request:
            return self.capacity.requests
        return min(self.capacity.requests, int(self.question.step_budget_ms / self.link_ms_per_request))

    @property
    def limited_by(self) -> str:
        """What stops one more request: "budget", or as `Capacity.limited_by`."""
        return self.capacity.limited_by if self.requests_in_budget == self.capacity.requests else "budget"


@dataclass(frozen=True)
class Plan:
    """The answer."""

    question: Question
    options: tuple[Option, ...]

    @property
    def best(self) -> Option | None:
        """The most requests within the budget; of equals the least fetched, then the smallest. None: nothing fits."""
        fitting = [option for option in self.options if option.requests_in_budget]
        return max(fitting, key=_preference, default=None)

    @property
    def best_with_fp8_index_keys(self) -> Option | None:
        """The best with FP8 index keys; None unless keys in the dtype are what keeps its requests from being more."""
        best, question = self.best, self.question.with_fp8_index_keys()
        if best is None or question is None or best.limited_by != "selection_state":
            return None
        other = make_plan(question).best
        return other if other is not None and other.requests_in_budget > best.requests_in_budget else None

    @property
    def recommended(self) -> HiSparseConfig | None:
        """What to serve with, on each GPU."""
        if self.best is None:
            return None
        return HiSparseConfig.from_mapping(recommended_keys(self.best))


def make_plan(question: Question) -> Plan:
    """Look at every reservation. Raises `ValueError` for sizes that a layout cannot have."""
    return Plan(question, tuple(_option(question, size) for size in question.reservations))


def recommended_keys(option: Option) -> dict[str, Any]:
    """The keys of `--hisparse-config` for an option: its sizes, and what the question's own differs in."""
    given, default = option.question.config, HiSparseConfig()
    sizes = {
        "top_k": option.question.family.top_k,
        "device_buffer_size": option.device_buffer_size,
        "max_running_requests": option.requests_in_budget,
    }
    named = {field.name: getattr(given, field.name) for field in fields(given)}
    return sizes | {
        name: value for name, value in named.items() if name not in sizes and value != getattr(default, name)
    }


def _option(question: Question, device_buffer_size: int) -> Option:
    fits = capacity(
        question.family,
        question.context,
        device_buffer_size,
        question.cache_bytes,
        question.machine.host_bytes_per_gpu,
        heated=question.heated,
    )
    size = question.footprint(fits.requests, device_buffer_size) if fits.requests else None
    return Option(question, device_buffer_size, fits, size)


def _preference(option: Option) -> tuple[float, ...]:
    return option.requests_in_budget, -option.miss_rate, -option.device_buffer_size
