"""Every interleaving of small launches keeps every rule, and every mutant of the protocol breaks one."""

from typing import NamedTuple

import pytest

from tests.kernels.interleavings import check, check_tables, run_launch
from tests.kernels.protocol_memory import Memory, Mutant, full_pool, release

OLD = [2, 4, 6, 8]  # stamps, all older than the list


class Case(NamedTuple):
    """A launch: what is in the pool, and the rows that each block selects."""

    start: Memory
    selections: list[tuple[int, ...]]


def stale_order() -> Memory:
    """Slots used since the list was made are passed over; the list alone does not suffice."""
    memory = full_pool(4, 8, stamps=OLD)
    memory.listed_at = 5  # slots 2 and 3 were used since
    return memory


def first_used_since() -> Memory:
    """The list's first slot was used since the list was made."""
    memory = full_pool(4, 8, stamps=OLD)
    memory.listed_at, memory.stamp[0] = 9, 12
    return memory


def short_order() -> Memory:
    """Only one of the slots is listed: the rest is found by laps."""
    memory = full_pool(4, 8, stamps=OLD)
    memory.order = [0]
    return memory


CASES = {
    "hits and misses": Case(full_pool(4, 8, stamps=OLD), [(0, 4), (1, 5)]),
    "a victim is hit by another block": Case(full_pool(4, 8, stamps=OLD), [(4, 5), (0, 1)]),
    "a shared miss": Case(full_pool(3, 6, stamps=OLD), [(4, 0), (4,)]),
    "a shared miss of three blocks": Case(full_pool(2, 4, stamps=OLD), [(3,), (3,), (3,)]),
    "free slots first": Case(full_pool(4, 8, stamps=OLD, free=1), [(4,), (5,)]),
    "only free slots": Case(full_pool(4, 8, stamps=OLD, free=4), [(4, 5), (5, 6)]),
    "a stale order": Case(stale_order(), [(4,), (5, 6)]),
    "a victim was used since": Case(first_used_since(), [(4,), (5,)]),
    "a short order": Case(short_order(), [(4, 1), (5,)]),
    "a short order against a claim from it": Case(short_order(), [(4,), (5, 6)]),
    "every slot is taken": Case(full_pool(3, 6, stamps=OLD), [(3, 4), (5,)]),
    "more than fits": Case(full_pool(2, 6, stamps=OLD), [(2, 3), (4,)]),
    "more than fits, shared": Case(full_pool(1, 4, stamps=OLD), [(2, 3), (3,)]),
    "one block": Case(full_pool(2, 4, stamps=OLD), [(2, 0)]),
}


def check_case(case: Case, mutant: Mutant | None = None) -> int:
    """Check every outcome; returns how many there are."""
    ends = 0
    for after in run_launch(case.start, case.selections, mutant):
        check(case.start, after, case.selections)
        ends += 1
    return ends


def check_two_launches(mutant: Mutant | None = None) -> None:
    """A launch, a release of one request's rows, and a launch that refills their slots."""
    start = full_pool(3, 6, stamps=OLD)
    for first in run_launch(start, [(3, 0), (4,)], mutant):
        check(start, first, [(3, 0), (4,)])
        between = release(first, (0, 3), mutant)
        check_tables(between)
        for second in run_launch(between, [(5, 3), (4,)], mutant):
            check(between, second, [(5, 3), (4,)])


def check_a_refilled_slot(mutant: Mutant | None = None) -> None:
    """Slot 0 comes first on a list made before row 4 took it over: the list's other entries leave before it.

    Not by recency, where the stamp alone tells.
    """
    start = full_pool(3, 6, stamps=OLD)
    start.listed_at = 2 * start.step - 3
    start.row_of_slot[0] = start.data[0] = 4
    start.slot_of_row[0], start.slot_of_row[4] = -1, 0
    start.stamp[0] = start.entered[0] = 2 * start.step - 2
    for after in run_launch(start, [(3,), (5,)], mutant, by_recency=False):
        check(start, after, [(3,), (5,)], by_recency=False)
        assert 0 not in after.claimed, "the newest record left first"


def check_everything(mutant: Mutant) -> None:
    for case in CASES.values():
        check_case(case, mutant)
    check_a_refilled_slot(mutant)
    check_two_launches(mutant)


@pytest.mark.parametrize("name", CASES)
def test_every_interleaving_keeps_the_rules(name: str) -> None:
    assert check_case(CASES[name]) >= 1


def test_a_release_between_launches() -> None:
    check_two_launches()


def test_a_refilled_slot() -> None:
    check_a_refilled_slot()


@pytest.mark.parametrize("mutant", Mutant)
def test_every_mutant_is_caught(mutant: Mutant) -> None:
    with pytest.raises(AssertionError):
        check_everything(mutant)


def test_interleavings_differ() -> None:
    """The model is not vacuous: blocks that race for slots end up with different ones."""
    outs = {tuple(sorted(after.out.items())) for after in run_launch(*CASES["every slot is taken"])}
    assert len(outs) > 1
