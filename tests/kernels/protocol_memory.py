"""Global memory as the protocol's model (protocol.py) sees it: one layer's tables, and single accesses to them."""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

NOWHERE, PENDING, FREE = -1, -2, -1
STEP_AFTER_LIST = 10  # the launch's step; the list was made at the end of the step before, or earlier

Access = Callable[["Memory"], Any]


class Mutant(Enum):
    """One mistake each."""

    NO_BARRIER = "claims do not wait for all lookups"
    READ_THEN_WRITE = "a miss is noted without compare-and-swap"
    HIT_WITHOUT_STAMP = "a hit does not raise its slot's stamp"
    SAME_CANDIDATE = "claims do not count from their own place in the order"
    STAMP_NOT_CHECKED = "entries of the order are taken without looking at the stamp"
    TOUCHED_LEAVES = "entries of the order that were used since it was made are taken"
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


class Private(NamedTuple):
    """An access that no other block of the launch can notice: it needs no turn of its own."""

    access: Access


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
        return tuple(_frozen(value) for value in vars(self).values())


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple(sorted(value.items()))
    return tuple(value) if isinstance(value, list) else value


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
