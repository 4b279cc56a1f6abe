"""All policies with all sizes over one trace, in several processes; and what the figures are called."""

import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from hisparse.trace.hint import Hint, simulate_lru_with_hints
from hisparse.trace.policies import SIMULATED
from hisparse.trace.simulator import Outcome, check_policy, check_size, simulate
from hisparse.trace.stream import Stream, make_stream
from hisparse.trace.trace import Trace

RECORD_BYTES = 1152  # of a bf16 record of latent attention

_given: list["tuple[Stream, int]"] = []  # to a worker process: the stream, and how many steps to skip


class _Job(NamedTuple):
    """One run. LRU's also says what hints are worth, if `with_hints`."""

    policy: str
    size: int
    with_hints: bool


_Result = tuple[Outcome, Hint | None]


@dataclass(frozen=True)
class Sweep:
    """What to simulate.

    Args:
        policies: names of `SIMULATED`.
        sizes: B of each run.
        skip: first steps, simulated and not counted.
        record_bytes: of a record, for the bytes fetched.
        seed: of the order in which records of one step enter.

    Raises:
        ValueError: no policies or sizes, or a number that cannot be.
    """

    policies: tuple[str, ...]
    sizes: tuple[int, ...]
    skip: int = 0
    record_bytes: int = RECORD_BYTES
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.policies or not self.sizes:
            raise ValueError("a simulation needs at least one policy and one size")
        for name, value, least in (("skip", self.skip, 0), ("record_bytes", self.record_bytes, 1)):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")

    def check(self, trace: Trace) -> None:
        """Raise `ValueError` for what does not fit the trace, before anything is simulated."""
        if self.skip >= trace.num_steps:
            raise ValueError(f"skip must leave some of the trace's {trace.num_steps} steps, got {self.skip}")
        for policy in self.policies:
            check_policy(policy, trace.runners_up is not None)
        for size in self.sizes:
            check_size(size, trace.k)


def run_sweep(trace: Trace, sweep: Sweep, workers: int | None = None) -> tuple[list[Outcome], list[Hint]]:
    """Every policy with every size, and the hint of the line before with every size.

    Args:
        trace: what is replayed.
        sweep: under what.
        workers: processes; default: one a core. 1 runs everything here.

    Raises:
        ValueError: a policy or a size that does not fit the trace.
    """
    sweep.check(trace)
    stream = make_stream(trace, sweep.seed)
    jobs = _jobs(trace, sweep)
    if "belady" in sweep.policies:
        _ = stream.next_uses  # made once, before the processes begin
    results = list(_run((stream, sweep.skip), jobs, min(workers or os.cpu_count() or 1, len(jobs))))
    outcomes = [outcome for outcome, _ in results if outcome.policy in sweep.policies]
    return outcomes, [hint for _, hint in results if hint is not None]


def _jobs(trace: Trace, sweep: Sweep) -> list[_Job]:
    """Every policy with every size; LRU in any case where there are hints, which are judged under it."""
    has_hints = trace.num_lines > 1 and trace.line_name == "layer"
    policies = dict.fromkeys((*sweep.policies, "lru") if has_hints else sweep.policies)
    return [_Job(policy, size, has_hints and policy == "lru") for policy, size in product(policies, sweep.sizes)]


def _run(given: tuple[Stream, int], jobs: Sequence[_Job], workers: int) -> Iterator[_Result]:
    if workers == 1:
        yield from (_job(*given, job) for job in jobs)
        return
    method = "fork" if sys.platform == "linux" else "spawn"  # a fork has the stream at once
    context = multiprocessing.get_context(method)
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=given) as executor:
        yield from executor.map(_job_of_worker, jobs)


def _begin(stream: Stream, skip: int) -> None:
    import torch

    torch.set_num_threads(1)
    _given[:] = [(stream, skip)]


def _job_of_worker(job: _Job) -> _Result:
    return _job(*_given[0], job)


def _job(stream: Stream, skip: int, job: _Job) -> _Result:
    if job.with_hints:
        return simulate_lru_with_hints(stream, job.size, skip)
    return simulate(stream, job.policy, job.size), None


def find_policy(name: str) -> str:
    """The policy that a command line means: `s3-fifo`, `S3FIFO` and `s3_fifo` are one. Raises `ValueError`."""

    def plain(text: str) -> str:
        return text.lower().replace("-", "").replace("_", "")

    known = {plain(policy): policy for policy in SIMULATED}
    if plain(name) not in known:
        raise ValueError(f"--policies takes {', '.join(SIMULATED)}, got {name!r}")
    return known[plain(name)]


def result_of(outcome: Outcome, trace: Trace, sweep: Sweep) -> dict[str, Any]:
    """An outcome's figures; rates are fractions of k, bytes are of all lines."""
    counted = outcome.misses[sweep.skip :]
    fetched_bytes = int(counted.sum()) * sweep.record_bytes
    return {
        "policy": outcome.policy,
        "size": outcome.size,
        "miss_rate": float(counted.mean() / trace.k),
        "misses": int(counted.sum()),
        "fetched_bytes": fetched_bytes,
        "fetched_bytes_per_step": fetched_bytes / len(counted),
        f"miss_rate_by_{trace.line_name}": _rounded(counted.mean(axis=0) / trace.k),
        "miss_rate_by_step": _rounded(outcome.misses.mean(axis=1) / trace.k),  # skipped ones too
    }


def _rounded(rates: Any) -> list[float]:
    return [round(float(rate), 5) for rate in rates]
