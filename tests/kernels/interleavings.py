"""Every interleaving of a launch's blocks (protocol.py), and the rules that each outcome must keep."""

from collections.abc import Iterator
from typing import Any

from tests.kernels.protocol import Block, Launch, block
from tests.kernels.protocol_memory import FREE, NOWHERE, PENDING, Memory, Mutant, Private, Wait


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
    pending: list[Any] = [go_on(one, memory, None) for one in blocks]
    history: list[list[Any]] = [[] for _ in blocks]
    for number in schedule:
        access = pending[number]
        result = None if isinstance(access, Wait) else access(memory)
        history[number].append(result)
        pending[number] = go_on(blocks[number], memory, result)
    state = (memory.key(), tuple(map(tuple, history)))
    if all(access is None for access in pending):
        return memory, None, state
    choices = [
        number
        for number, access in enumerate(pending)
        if access is not None and (not isinstance(access, Wait) or access.holds(memory))
    ]
    return memory, choices, state


def go_on(one: Block, memory: Memory, result: Any) -> Any:
    """The block's next access that others can notice; None: it is through."""
    try:
        access = one.send(result)
        while isinstance(access, Private):
            access = one.send(access.access(memory))
    except StopIteration:
        return None
    return access


def close(memory: Memory, launch: Launch) -> Memory:
    """What the last block does, and what a kernel's end settles: the next launch counts from here."""
    memory = memory.copy()
    taken = min(memory.found, len(memory.free))
    memory.free = memory.free[: len(memory.free) - taken]
    memory.cursor = min(launch.cursor + memory.found - taken + memory.passed, len(memory.order))
    memory.arrived = memory.found = memory.done = memory.passed = memory.lap = 0
    memory.step += 1
    return memory


# The rules


def check(before: Memory, after: Memory, selections: list[tuple[int, ...]], by_recency: bool = True) -> None:
    """Every rule that an outcome can break; numbers are those of docs/architecture.md."""
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
    if by_recency and set(before.order) == {slot for slot, row in enumerate(before.row_of_slot) if row != NOWHERE}:
        check_recency(before, set(evicted), wanted)
    check_tables(after)


def check_recency(before: Memory, evicted: set[int], wanted: set[int]) -> None:
    """A slot used since the list was made leaves only after all that were not."""
    unused = {slot for slot in before.order if before.stamp[slot] <= before.listed_at}
    unused -= {slot for slot, row in enumerate(before.row_of_slot) if row in wanted}
    assert evicted <= unused or unused <= evicted, "a slot used since the list was made left before one that was not"


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
