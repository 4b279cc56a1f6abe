"""Results of the resolve bench as a table to read: one line a batch size, as they come."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Column(NamedTuple):
    """A column: its heading, and how a result fills it."""

    heading: str
    fill: str  # a format of the result's fields


COLUMNS = (
    Column("batch", "{batch}"),
    Column("us", "{us:.1f}"),
    Column("p10 / p50 / p90", "{us_p10:.1f} / {us_p50:.1f} / {us_p90:.1f}"),
    Column("us no IO", "{us_no_io:.1f}"),
    Column("misses", "{misses:.0f}"),
    Column("miss %", "{miss_percent:.2f}"),
    Column("GB/s", "{gb_per_s:.1f}"),
    Column("copy GB/s", "{copy_gb_per_s:.1f}"),
    Column("x copy", "{ratio}"),
    Column("rebuild %", "{rebuild_percent:.1f}"),
)
EXACT_COLUMNS = (Column("exact misses", "{exact:.0f}"), Column("x exact", "{exact_ratio}"))
NONE = "-"


def heading(result: Mapping[str, Any]) -> str:
    """What all lines belong to, and the columns' names."""
    about = (
        f"{result['device']}, commit {result['commit'] or 'unknown'}: trace {result['trace']}, k {result['k']}, "
        f"B {result['buffer']}, {result['record_bytes']} B records, {result['layers']} layers, "
        f"{result['steps']} steps, {result['policy']}"
    )
    return f"{about}\n{_line([column.heading for column in _columns(result)], result)}"


def line(result: Mapping[str, Any]) -> str:
    """One result."""
    values = {
        **result,
        "miss_percent": 100 * result["miss_rate"],
        "rebuild_percent": 100 * result["rebuild_share"],
        "ratio": NONE if result["ratio_to_copy"] is None else f"{result['ratio_to_copy']:.2f}",
        "exact_ratio": NONE if result.get("miss_ratio") is None else result["miss_ratio"],
        "exact": result.get(f"misses_exact_{result['policy']}"),
    }
    return _line([column.fill.format(**values) for column in _columns(result)], result)


def _columns(result: Mapping[str, Any]) -> tuple[Column, ...]:
    return COLUMNS + EXACT_COLUMNS if "miss_ratio" in result else COLUMNS


def _line(cells: list[str], result: Mapping[str, Any]) -> str:
    widths = [max(len(column.heading), 21 if " / " in column.heading else 7) for column in _columns(result)]
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
