"""The protocol of resolve.cu and claim.cuh on global memory, as a model small enough to try every interleaving.

A block is a generator that yields one access to global memory at a time; `explore` runs the blocks of a launch in
every order of accesses, and `check` holds each outcome against the rules of DESIGN.md section 4. A block here is one
thread: threads of a real block meet at barriers and share nothing else. `Mutant` names ways to get it wrong; the
tests demand that each is noticed.
"""

from collections.abc import Callable, Generator, Iterator
from copy import copy
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

NOWHERE, PENDING, FREE = -1, -2, -1
STEP_AFTER_LIST = 10  # the launch's step; the list was made at the end of the step before, or earlier

Access = Callable[["Memory"], Any]
Block = Generator["Wait | Access", Any, None]


class Mutant(Enum):
    """One mistake each."""

    NO_BARRIER = "claims do not wait for all lookups"
    READ_THEN_WRITE = "a miss is noted without compare-and-swap"
    HIT_WITHOUT_STAMP = "a hit does not raise its slot's stamp"
    SAME_CANDIDATE = "claims do not count from their own place in the order"
    STAMP_NOT_CHECKED = "entries of the order are taken without looking at the stamp"
    ENTRY_NOT_CHECKED = "an entry is taken though its slot changed hands since the list was made"
    LAP_AT_ONCE = "laps do not wait for the claims from the order"
    LAP_TAKES_USED = "laps take slots of this step"
    WAITER_DOES_NOT_WAIT = "a waiter reads once"
    VICTIM_NOT_CLEARED = "the victim's row still points at the slot"
    FAILURE_STAYS_PENDING = "a miss without a slot is not taken back"
    RELEASE_KEEPS_ROW = "release leaves slot_of_row"
    RELEASE_LOSES_SLOT = "release does not return the slot"


class Wait(NamedTuple):
    """The block goes on once this holds."""

    holds: Callable[["Memory"], bool]


@dataclass
class Memory:
    """One layer's tables; `data` is the row whose bytes a slot holds."""

    slot_of_row: list[int]
    row_of_slot: list[int]
    stamp: list[int]
    data: list[int]
    order: list[int]
    free: list[int]
    entered: list[int]
    cursor: int = 0
    listed_at: int = 2 * STEP_AFTER_LIST - 1
    step: int = STEP_AFTER_LIST
    arrived: int = 0
    found: int = 0  # misses of the blocks that arrived
    done: int = 0
    passed: int = 0
    lap: int = 0
    claimed: list[int] = field(default_factory=list)  # for the checks alone: slots, as they are claimed
    out: dict[tuple[int, int], int] = field(default_factory=dict)  # (block, row) -> slot

    def copy(self) -> "Memory":
        """An independent copy."""
        twin = copy(self)
        for name, value in vars(self).items():
            setattr(twin, name, copy(value))
        return twin

    def key(self) -> tuple[Any, ...]:
        """Equal for equal memories."""
        values = (getattr(self, name) for name in self.__dataclass_fields__)
        return tuple(tuple(sorted(v.items())) if isinstance(v, dict) else str(v) for v in values)


def full_pool(num_slots: int, num_rows: int, *, stamps: list[int], free: int = 0) -> Memory:
    """Row r is in slot r for the first slots, the last `free` slots are free; the order is by stamp."""
    used = num_slots - free
    return Memory(
        slot_of_row=[row if row < used else NOWHERE for row in range(num_rows)],
        row_of_slot=[slot if slot < used else NOWHERE for slot in range(num_slots)],
        stamp=[stamps[slot] if slot < used else FREE for slot in range(num_slots)],
        data=[slot if slot < used else NOWHERE for slot in range(num_slots)],
        order=sorted(range(used), key=lambda slot: stamps[slot]),
        free=list(range(used, num_slots)),
        entered=[stamps[slot] if slot < used else FREE for slot in range(num_slots)],
    )


# Accesses


def read(table: str, at: int) -> Access:
    return lambda memory: getattr(memory, table)[at]


def write(table: str, at: int, value: int) -> Access:
    def access(memory: Memory) -> None:
        getattr(memory, table)[at] = value

    return access


def swap(table: str, at: int, expected: int, value: int) -> Access:
    def access(memory: Memory) -> int:
        before: int = getattr(memory, table)[at]
        if before == expected:
            getattr(memory, table)[at] = value
        return before

    return access


def add(name: str, amount: int = 1) -> Access:
    def access(memory: Memory) -> int:
        before: int = getattr(memory, name)
        setattr(memory, name, before + amount)
        return before

    return access


def arrive(misses: int) -> Access:
    def access(memory: Memory) -> int:
        memory.arrived += 1
        memory.found += misses
        return memory.found - misses

    return access


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
    if launch.wrong(Mutant.READ_THEN_WRITE):
        slot: int = yield read("slot_of_row", row)
        if slot == NOWHERE:
            yield write("slot_of_row", row, PENDING)
    else:
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
        unused = launch.wrong(Mutant.STAMP_NOT_CHECKED) or FREE < stamp <= launch.limit
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
    yield lambda memory: memory.claimed.append(slot)
    if evicted != NOWHERE and not launch.wrong(Mutant.VICTIM_NOT_CLEARED):
        yield swap("slot_of_row", evicted, slot, NOWHERE)
    yield write("row_of_slot", slot, row)
    yield write("stamp", slot, launch.now)
    yield write("entered", slot, launch.now)
    yield write("slot_of_row", row, slot)
    yield write("data", slot, row)
    yield from answer(number, row, slot)


def answer(number: int, row: int, slot: int) -> Block:
    def access(memory: Memory) -> None:
        memory.out[number, row] = slot

    yield access


# Every interleaving


def run_launch(
    start: Memory, selections: list[tuple[int, ...]], mutant: Mutant | None = None, by_recency: bool = True
) -> Iterator[Memory]:
    """The memory after one launch, for every interleaving of its blocks' accesses that ends differently."""
    launch = Launch(
        num_blocks=len(selections),
        num_slots=len(start.stamp),
        order=tuple(start.order),
        free=tuple(start.free),
        cursor=start.cursor,
        listed_at=start.listed_at,
        limit=min(start.listed_at, 2 * start.step - 1) if by_recency else 2 * start.step - 1,
        now=2 * start.step,
        mutant=mutant,
    )
    seen, ends = set(), set()
    unexplored: list[tuple[int, ...]] = [()]
    while unexplored:
        schedule = unexplored.pop()
        memory, choices, state = replay(start, launch, selections, schedule)
        if state in seen:
            continue
        seen.add(state)
        if choices is None:
            if memory.key() not in ends:
                ends.add(memory.key())
                yield close(memory, launch)
            continue
        assert choices, f"deadlock after {schedule}"
        unexplored.extend((*schedule, number) for number in choices)


def replay(
    start: Memory, launch: Launch, selections: list[tuple[int, ...]], schedule: tuple[int, ...]
) -> tuple[Memory, list[int] | None, Any]:
    """Run the blocks in the order given; returns who can go on (None: all are through) and the state's key."""
    memory = start.copy()
    blocks = [block(launch, number, rows) for number, rows in enumerate(selections)]
    pending: list[Any] = [next(one) for one in blocks]
    history: list[list[Any]] = [[] for _ in blocks]
    for number in schedule:
        access = pending[number]
        result = None if isinstance(access, Wait) else access(memory)
        history[number].append(result)
        try:
            pending[number] = blocks[number].send(result)
        except StopIteration:
            pending[number] = None
    state = (memory.key(), tuple(map(tuple, history)))
    if all(access is None for access in pending):
        return memory, None, state
    choices = [
        number
        for number, access in enumerate(pending)
        if access is not None and (not isinstance(access, Wait) or access.holds(memory))
    ]
    return memory, choices, state


def close(memory: Memory, launch: Launch) -> Memory:
    """What the last block does, and what a kernel's end settles: the next launch counts from here."""
    memory = memory.copy()
    taken = min(memory.found, len(memory.free))
    memory.free = memory.free[: len(memory.free) - taken]
    memory.cursor = min(launch.cursor + memory.found - taken + memory.passed, len(memory.order))
    memory.arrived = memory.found = memory.done = memory.passed = memory.lap = 0
    memory.step += 1
    return memory


def release(memory: Memory, rows: tuple[int, ...], mutant: Mutant | None = None) -> Memory:
    """As release.cu: on the main stream, between launches."""
    memory = memory.copy()
    for row in rows:
        slot = memory.slot_of_row[row]
        if slot < 0:
            continue
        if mutant is not Mutant.RELEASE_KEEPS_ROW:
            memory.slot_of_row[row] = NOWHERE
        memory.row_of_slot[slot] = NOWHERE
        memory.stamp[slot] = memory.entered[slot] = FREE
        if mutant is not Mutant.RELEASE_LOSES_SLOT:
            memory.free.append(slot)
    memory.claimed, memory.out = [], {}
    return memory


# The rules


def check(before: Memory, after: Memory, selections: list[tuple[int, ...]]) -> None:
    """Every rule that an outcome can break; numbers are those of DESIGN.md section 4."""
    wanted = {row for rows in selections for row in rows}
    missing = {row for row in wanted if before.slot_of_row[row] == NOWHERE}
    room = len(before.stamp) - (len(wanted) - len(missing))
    assert len(after.out) == sum(map(len, selections)), "an output entry was not written"
    for (_, row), slot in after.out.items():
        if slot == NOWHERE:
            assert len(missing) > room, "9: a miss found no slot though there was room"
            continue
        assert slot >= 0, "3: a waiter was handed no slot"
        assert after.data[slot] == row, "2: the slot handed out holds another record"
        assert after.slot_of_row[row] == slot, "2: the row does not point at its slot"
        assert after.stamp[slot] >= 2 * before.step, "6: a slot of this step is not stamped as used"
    assert len(after.claimed) == len(set(after.claimed)), "2: a slot was claimed twice"
    assert len(after.claimed) == min(len(missing), room), "3: a row was fetched twice, or not at all"
    evicted = [slot for slot in after.claimed if before.row_of_slot[slot] != NOWHERE]
    assert len(evicted) == max(0, len(after.claimed) - len(before.free)), "4: a victim went before a free slot"
    check_tables(after)


def check_tables(memory: Memory) -> None:
    """No table contradicts another, and every slot is free or used."""
    for row, slot in enumerate(memory.slot_of_row):
        assert slot != PENDING, "9: a row is still on its way"
        assert slot == NOWHERE or memory.row_of_slot[slot] == row, "2: a row points at a slot that has another"
    for slot, row in enumerate(memory.row_of_slot):
        assert row == NOWHERE or memory.slot_of_row[row] == slot, "2: a slot's row does not point back"
        assert row == NOWHERE or memory.data[slot] == row, "2: a slot holds another record than its row's"
        assert (row == NOWHERE) == (memory.stamp[slot] == FREE), "7: a slot is free and used, or neither"
    free = [slot for slot, row in enumerate(memory.row_of_slot) if row == NOWHERE]
    assert sorted(memory.free) == free, "4: the free list is not the free slots"
