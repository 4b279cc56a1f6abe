"""One thing that was looked at: how it is, what that means, and what to do about it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """How something is."""

    OK = "ok"
    MISSING = "missing"  # or broken: `fix` says what to do
    NOTE = "note"  # neither good nor bad, such as a machine without a GPU


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's."""

    name: str
    status: Status
    says: str  # what was found and what it means; one line
    fix: str | None = None  # a command, or what to do in words
    values: Mapping[str, Any] = field(default_factory=dict)  # the same for machines; sizes in bytes


def first_line(error: BaseException) -> str:
    """An error as part of a line."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
