"""Replay a trace under a policy and count what it would have fetched.

The rules are those under which published figures were made (docs/traces.md): in each step the newest position of the
step before joins the residents, hits and misses are told apart, the lowest-ranked residents that this step does not
select leave for the misses, and then the misses enter.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hisparse.trace.policies import SIMULATED
from hisparse.trace.policy import SimulatedPolicy
from hisparse.trace.simulated_pool import SimulatedPool
from hisparse.trace.stream import Stream


class Outcome(NamedTuple):
    """What one policy did with one size."""

    policy: str
    size: int  # B
    misses: NDArray[np.int32]  # [steps, lines]


def simulate(stream: Stream, policy: str, size: int) -> Outcome:
    """Replay a stream.

    Args:
        stream: of a trace, see `make_stream`.
        policy: one of `SIMULATED`.
        size: B, slots of a line, at least k.

    Raises:
        ValueError: a policy that does not exist or needs scores that the trace does not have, or a size below k.
    """
    check_policy(policy, stream.runners_up is not None)
    check_size(size, stream.k)
    pool = SimulatedPool(stream, size)
    return Outcome(policy, size, replay(stream, pool, SIMULATED[policy](pool, stream)))


def replay(stream: Stream, pool: SimulatedPool, rule: SimulatedPolicy) -> NDArray[np.int32]:
    """Walk a stream over an empty pool; misses, [steps, lines]."""
    misses = np.zeros((stream.num_steps, stream.num_lines), np.int32)
    for step in range(stream.num_steps):
        if step:
            _join(pool, rule, stream, step)
        misses[step] = _step(pool, rule, stream, step)
    return misses


def check_policy(policy: str, has_scores: bool) -> None:
    """Raise `ValueError` for a policy that does not exist, or that needs scores which are not there."""
    if policy not in SIMULATED:
        raise ValueError(f"a policy must be one of {', '.join(SIMULATED)}, got {policy!r}")
    if SIMULATED[policy].needs_scores and not has_scores:
        raise ValueError(
            f"the policy {policy} needs the positions ranked k + 1 to 2k at every step, and the trace does not have "
            f"them for this k: leave it out, take a smaller --k, or record with scores"
        )


def check_size(size: int, k: int) -> None:
    """Raise `ValueError` for slots that do not hold a selection."""
    if size < k:
        raise ValueError(f"a size must be at least k = {k}, so that a selection fits, got {size}")


def _join(pool: SimulatedPool, rule: SimulatedPolicy, stream: Stream, step: int) -> None:
    """The newest record of the step before is in the cache like any other."""
    rows = stream.newest[step - 1]
    if len(rows):
        rule.entered(pool.enter(rows), step - 1)


def _step(pool: SimulatedPool, rule: SimulatedPolicy, stream: Stream, step: int) -> NDArray[np.int64]:
    """One step of all lines; misses of each."""
    rows = stream.selected[step]
    slots = pool.slot_of_row[rows]
    found = slots >= 0
    hits, missing = slots[found], rows[np.flatnonzero(~found)]
    pool.used_at[hits] = step
    rule.hit(hits, step)
    counts = np.bincount(missing // pool.num_rows, minlength=pool.num_lines)
    leaving = rule.victims((pool.num_resident + counts - pool.size).clip(min=0), step)
    rule.left(leaving, step)
    pool.leave(leaving)
    entered = pool.enter(missing)
    pool.used_at[entered] = step
    rule.entered(entered, step)
    return counts
