"""Everything that is known of a trace under some policies, as one object for machines and for the plots."""

import json
from pathlib import Path
from typing import Any

from hisparse.trace.locality import locality
from hisparse.trace.sweep import Sweep, result_of, run_sweep
from hisparse.trace.trace import Trace

KEYS = ("trace", "about", "steps", "skip", "lines", "line_name", "line_numbers", "k", "results", "overlap")


def make_report(trace: Trace, sweep: Sweep, workers: int | None = None) -> dict[str, Any]:
    """Simulate and measure.

    Returns:
        An object of plain values. `results` has one entry a policy and size (see `result_of`), `hints` one a size,
        and `overlap`, `reuse` and the rest are those of `locality`.

    Raises:
        ValueError: a policy or a size that does not fit the trace.
    """
    outcomes, hints = run_sweep(trace, sweep, workers)
    found = locality(trace, sweep.skip)
    return {
        "trace": trace.name,
        "about": dict(trace.about),
        "steps": trace.num_steps,
        "skip": sweep.skip,
        "lines": trace.num_lines,
        "line_name": trace.line_name,
        "line_numbers": list(trace.lines),
        "k": trace.k,
        "record_bytes": sweep.record_bytes,
        "has_scores": trace.runners_up is not None,
        "results": [result_of(outcome, trace, sweep) for outcome in outcomes],
        "hints": [
            {**hint._asdict(), "recall": hint.recall, "precision": hint.precision, "traffic": hint.traffic}
            for hint in hints
        ],
        "overlap": {},
        **found,
    }


def read_report(path: Path) -> dict[str, Any]:
    """A report in a file. Raises `ValueError` for a file that does not hold one."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"the report {path} cannot be read: {error.strerror or error}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"the report {path} is not JSON: {error}") from error
    missing = [name for name in KEYS if not isinstance(report, dict) or name not in report]
    if missing:
        raise ValueError(
            f"the report {path} must be what `hisparse trace simulate --json` prints; it lacks {', '.join(missing)}"
        )
    found: dict[str, Any] = report
    return found
