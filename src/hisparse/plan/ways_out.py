"""What would have to change for a plan in which nothing fits."""

from dataclasses import replace

from hisparse.engine.family import Family
from hisparse.plan.capacity import largest
from hisparse.plan.footprint import Footprint, footprint
from hisparse.plan.machine import MOST_GPUS, Machine
from hisparse.plan.plan import Plan
from hisparse.plan.quantities import at_least, in_words
from hisparse.plan.question import Question


def why_nothing_fits(question: Question) -> str:
    """What one request needs, what there is, and each option that would make it fit."""
    one = question.footprint(1, min(question.reservations))
    return f"nothing fits: {'; '.join(_shortages(question, one))}. {_changes(question, one)}"


def why_over_budget(plan: Plan) -> str:
    """The budget that one request would need."""
    least = min(option.link_ms_per_request for option in plan.options if option.capacity.requests)
    return (
        f"nothing fits the step's budget: the misses of one request take at least {least:.3g} ms of the link, and "
        f"--step-budget is {plan.question.step_budget_ms:g} ms. Use --step-budget {least * 1.01:.3g} or more, a larger "
        f"--device-buffer-size or a faster --link"
    )


def _shortages(question: Question, one: Footprint) -> list[str]:
    machine, weights = question.machine, question.machine.weight_bytes_per_gpu(question.weights)
    shortages = []
    if weights + one.device_bytes > machine.usable_bytes:
        shortages.append(
            f"on each GPU ({machine.gpus}) the weights take {in_words(weights)} and the cache of one request of "
            f"{question.context:,} tokens {in_words(one.device_bytes)}, of {in_words(machine.usable_bytes)} usable "
            f"({machine.memory_fraction:.0%} of {in_words(machine.device_memory)})"
        )
    if one.host_bytes > machine.host_bytes_per_gpu:
        shortages.append(
            f"its records take {in_words(one.host_bytes)} of host memory, of {in_words(machine.host_bytes_per_gpu)} "
            f"for each GPU"
        )
    return shortages


def _changes(question: Question, one: Footprint) -> str:
    machine, weights = question.machine, question.machine.weight_bytes_per_gpu(question.weights)
    changes = []
    if weights + one.device_bytes > machine.usable_bytes:
        needed = int((weights + one.device_bytes) / machine.memory_fraction) + 1
        changes.append(f"--device-memory {at_least(needed)}")
    if one.host_bytes > machine.host_bytes_per_gpu:
        changes.append(f"--host-memory {at_least(one.host_bytes * machine.gpus)}")
    together = " with ".join(changes)
    others = [
        *_more_gpus(question),
        *_shorter_context(question),
        *_smaller_buffer(question),
        *_smaller_index_keys(question),
    ]
    if weights > machine.usable_bytes:
        others.append("weights in a smaller format (--weight-memory)")
    return f"It would fit with {', or with '.join([f'at least {together}', *others])}"


def _more_gpus(question: Question) -> list[str]:
    """The next number of GPUs with which one request fits, if there is one."""
    for gpus in range(question.machine.gpus + 1, MOST_GPUS + 1):
        machine = replace(question.machine, gpus=gpus)
        family = question.family_on(machine)
        if family is not None and _fits(question, family, machine, question.context):
            return [f"--gpus {gpus}"]
    return []


def _shorter_context(question: Question) -> list[str]:
    """The longest context that fits, if only it is too long."""
    context = largest(lambda length: _fits(question, question.family, question.machine, length), question.context)
    return [f"--context {context}"] if context else []


def _smaller_buffer(question: Question) -> list[str]:
    """The largest reservation that fits, if the configuration's is above the default."""
    config, top_k = question.config, question.family.top_k
    own = config.device_buffer_size
    if own is None or own <= replace(config, device_buffer_size=None).buffer_for(top_k):
        return []
    least = max(top_k, config.top_k or 0)  # a reservation is above it
    more = largest(
        lambda extra: _fits(question, question.family, question.machine, question.context, least + extra), own - least
    )
    return [f"--device-buffer-size {least + more}"] if more else []


def _smaller_index_keys(question: Question) -> list[str]:
    """FP8 index keys, if one request fits with them."""
    other = question.with_fp8_index_keys()
    fits = other is not None and _fits(other, other.family, other.machine, other.context)
    return ['"index_cache_dtype": "fp8" in --hisparse-config'] if fits else []


def _fits(question: Question, family: Family, machine: Machine, context: int, buffer: int | None = None) -> bool:
    """Whether one request fits, with this reservation or the question's smallest."""
    one = footprint(family, context, 1, buffer or min(question.reservations), heated=question.heated)
    fits_device = one.device_bytes <= machine.cache_bytes_per_gpu(question.weights)
    return fits_device and one.host_bytes <= machine.host_bytes_per_gpu
