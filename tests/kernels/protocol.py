"""The protocol of resolve.cu and claim.cuh on global memory, as a model small enough to try every interleaving.

A block is a generator that yields one access to global memory at a time; interleavings.py runs the blocks of a launch
in every order of accesses and holds each outcome against the rules of docs/architecture.md. A block here is one
thread: threads of a real block meet at barriers and share nothing else. Memory is sequentially consistent here: that
an arrival releases what was written before it, and that seeing it acquires that, is for the kernel to get right.
`Mutant` names ways to get it wrong; the tests demand that each is noticed.
"""

from collections.abc import Generator
from typing import Any, NamedTuple

from tests.kernels.protocol_memory import (
    FREE,
    NOWHERE,
    PENDING,
    Access,
    Memory,
    Mutant,
    Private,
    Wait,
    add,
    arrive,
    read,
    swap,
    write,
)

Block = Generator[Wait | Private | Access, Any, None]


# A block of a launch, phase by phase as in resolve.cu


class Launch(NamedTuple):
    """What a launch's blocks read before they arrive: nobody changes it before that."""

    num_blocks: int
    num_slots: int
    order: tuple[int, ...]
    free: tuple[int, ...]
    cursor: int
    listed_at: int
    limit: int
    now: int
    mutant: Mutant | None

    def wrong(self, mutant: Mutant) -> bool:
        return self.mutant is mutant

    def candidate(self, index: int) -> int:
        if index < len(self.free):
            return self.free[-1 - index]
        return self.entry(self.cursor + index - len(self.free))

    def entry(self, at: int) -> int:
        return self.order[at] if at < len(self.order) else NOWHERE


def block(launch: Launch, number: int, rows: tuple[int, ...]) -> Block:
    misses, waiters = yield from look_up_all(launch, number, rows)
    first = yield arrive(len(misses))
    if not launch.wrong(Mutant.NO_BARRIER):
        yield Wait(lambda memory: memory.arrived == launch.num_blocks)
    total = yield lambda memory: memory.found
    left = yield from claim_all(launch, number, misses, first, max(0, total - len(launch.free)))
    yield add("done")
    yield from claim_the_rest(launch, number, left)
    for row in waiters:
        yield from serve_waiter(launch, number, row)


def look_up_all(launch: Launch, number: int, rows: tuple[int, ...]) -> Generator[Any, Any, tuple[list[int], list[int]]]:
    misses, waiters = [], []
    for row in rows:
        slot = yield from look_up(launch, row)
        if slot == NOWHERE:
            misses.append(row)
        elif slot == PENDING:
            waiters.append(row)
        else:
            yield from answer(number, row, slot)
    return misses, waiters


def claim_all(
    launch: Launch, number: int, misses: list[int], first: int, victims: int
) -> Generator[Any, Any, list[int]]:
    left = []
    for i, row in enumerate(misses):
        index = 0 if launch.wrong(Mutant.SAME_CANDIDATE) else first + i
        slot = yield from claim_from_order(launch, index, victims)
        if slot == NOWHERE:
            left.append(row)
        else:
            yield from publish(launch, number, slot, row)
    return left


def claim_the_rest(launch: Launch, number: int, left: list[int]) -> Block:
    if left and not launch.wrong(Mutant.LAP_AT_ONCE):
        yield Wait(lambda memory: memory.done == launch.num_blocks)
    for row in left:
        slot = yield from claim_by_lap(launch)
        if slot != NOWHERE:
            yield from publish(launch, number, slot, row)
            continue
        if not launch.wrong(Mutant.FAILURE_STAYS_PENDING):
            yield write("slot_of_row", row, NOWHERE)
        yield from answer(number, row, NOWHERE)


def serve_waiter(launch: Launch, number: int, row: int) -> Block:
    if not launch.wrong(Mutant.WAITER_DOES_NOT_WAIT):
        yield Wait(lambda memory: memory.slot_of_row[row] != PENDING)
    slot = yield read("slot_of_row", row)
    yield from answer(number, row, slot)


def look_up(launch: Launch, row: int) -> Generator[Any, Any, int]:
    slot: int = yield read("slot_of_row", row)
    if slot == NOWHERE and launch.wrong(Mutant.READ_THEN_WRITE):
        yield write("slot_of_row", row, PENDING)
    elif slot == NOWHERE:
        slot = yield swap("slot_of_row", row, NOWHERE, PENDING)
    if slot >= 0 and not launch.wrong(Mutant.HIT_WITHOUT_STAMP):
        yield write("stamp", slot, launch.now + 1)
    return slot


def claim_from_order(launch: Launch, index: int, victims: int) -> Generator[Any, Any, int]:
    slot = launch.candidate(index)
    if index < len(launch.free):
        return slot
    while slot != NOWHERE:
        stamp = yield read("stamp", slot)
        entered = yield read("entered", slot)
        limit = launch.now - 1 if launch.wrong(Mutant.TOUCHED_LEAVES) else launch.limit
        unused = launch.wrong(Mutant.STAMP_NOT_CHECKED) or FREE < stamp <= limit
        if unused and (launch.wrong(Mutant.ENTRY_NOT_CHECKED) or entered <= launch.listed_at):
            return slot
        extra = yield add("passed")
        slot = launch.entry(launch.cursor + victims + extra)
    return NOWHERE


def claim_by_lap(launch: Launch) -> Generator[Any, Any, int]:
    middle = launch.limit + (launch.now - launch.limit) // 2
    while True:
        at = yield add("lap")
        if at >= 2 * launch.num_slots:
            return NOWHERE
        slot = int(at % launch.num_slots)
        stamp = yield read("stamp", slot)
        lowest, highest = (FREE, middle) if at < launch.num_slots else (middle, launch.now - 1)
        if launch.wrong(Mutant.LAP_TAKES_USED) or lowest < stamp <= highest:
            return slot


def publish(launch: Launch, number: int, slot: int, row: int) -> Block:
    evicted = yield read("row_of_slot", slot)
    yield Private(lambda memory: memory.claimed.append(slot))
    if evicted != NOWHERE and not launch.wrong(Mutant.VICTIM_NOT_CLEARED):
        yield swap("slot_of_row", evicted, slot, NOWHERE)
    yield write("row_of_slot", slot, row)
    yield write("stamp", slot, launch.now)
    yield write("entered", slot, launch.now)
    yield write("slot_of_row", row, slot)
    yield Private(write("data", slot, row))  # read by later launches alone
    yield from answer(number, row, slot)


def answer(number: int, row: int, slot: int) -> Block:
    def access(memory: Memory) -> None:
        memory.out[number, row] = slot

    yield Private(access)
