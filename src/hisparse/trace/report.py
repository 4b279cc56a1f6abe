"""Everything that is known of a trace under some policies, as one object for machines and for the plots."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hisparse.trace.locality import BINS, REUSE_EDGES, locality
from hisparse.trace.sweep import Sweep, result_of, run_sweep
from hisparse.trace.trace import Trace, is_whole

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
    """A report in a file. Raises `ValueError` for a file that does not hold one, naming the field that is wrong."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"the report {path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"the report {path} is not JSON: {error}") from error
    missing = [name for name in KEYS if not isinstance(report, dict) or name not in report]
    if missing:
        raise ValueError(
            f"the report {path} must be what `hisparse trace simulate --json` prints; it lacks {', '.join(missing)}"
        )
    _Checked(path, "", report).check_report()
    found: dict[str, Any] = report
    return found


class _Checked(NamedTuple):
    """An object of a report, whose fields are checked one by one. Every method raises `ValueError` for a wrong one."""

    path: Path
    place: str  # of the object: 'results[3].', or nothing for the report itself
    values: Mapping[str, Any]

    def check_report(self) -> None:
        """All that the plots read."""
        self.expect("about", "an object", lambda about: isinstance(about, dict))
        for name in ("steps", "lines", "k"):
            self.expect(name, "a whole number from 1 on", lambda value: is_whole(value, 1))
        num_steps, num_lines = self.values["steps"], self.values["lines"]
        self.expect("skip", "a whole number below 'steps'", lambda skip: is_whole(skip, 0, num_steps - 1))
        self.expect("line_name", "'layer' or 'request'", lambda name: name in ("layer", "request"))
        self.expect("line_numbers", f"{num_lines} whole numbers", _all(lambda value: is_whole(value, 0), num_lines))
        self.expect("results", "a list of one or more results", lambda results: isinstance(results, list) and results)
        by_line = f"by_{self.values['line_name']}"
        for number, result in enumerate(self.values["results"]):
            self.inner(f"results[{number}]", result).check_result(num_steps, num_lines, by_line)
        if self.values["overlap"] != {}:
            self.inner("overlap", self.values["overlap"]).check_overlap(num_lines, by_line)
            self.check_reuse()

    def check_result(self, num_steps: int, num_lines: int, by_line: str) -> None:
        """One of `result_of`."""
        self.expect("policy", "a name", lambda name: isinstance(name, str))
        self.expect("size", "a whole number from 1 on", lambda size: is_whole(size, 1))
        self.expect("miss_rate", "a share", _is_share)
        self.expect("miss_rate_by_step", f"{num_steps} shares, one a step", _all(_is_share, num_steps))
        self.expect(f"miss_rate_{by_line}", f"{num_lines} shares, one a line", _all(_is_share, num_lines))

    def check_overlap(self, num_lines: int, by_line: str) -> None:
        """The overlap of `locality`."""
        self.expect("mean", "a share", _is_share)
        self.expect(by_line, f"{num_lines} shares, one a line", _all(_is_share, num_lines))
        self.expect("histogram", f"{BINS} counts", _all(_is_count, BINS))

    def check_reuse(self) -> None:
        """The other figures of `locality`."""
        line_overlap = f"{self.values['line_name']}_overlap"
        self.expect(line_overlap, "a share or null", lambda share: share is None or _is_share(share))
        self.expect("first_uses", "a count", _is_count)
        self.expect("reuse", f"{len(REUSE_EDGES)} bars", _all(lambda bar: isinstance(bar, dict), len(REUSE_EDGES)))
        for number, bar in enumerate(self.values["reuse"]):
            inner = self.inner(f"reuse[{number}]", bar)
            inner.expect("count", "a count", _is_count)
            inner.expect("steps", "first and last", _all(lambda end: end is None or is_whole(end, 1), 2))

    def expect(self, name: str, wanted: str, is_right: Callable[[Any], object]) -> None:
        """A field is there and right."""
        if name not in self.values or not is_right(self.values[name]):
            came = repr(self.values[name]) if name in self.values else "nothing"
            came = came if len(came) <= 60 else f"{came[:60]} ..."
            raise ValueError(f"the report {self.path} must have {wanted} as '{self.place}{name}', got {came}")

    def inner(self, place: str, values: Any) -> "_Checked":
        """An object in this one."""
        if not isinstance(values, dict):
            raise ValueError(f"the report {self.path} must have an object as '{place}', got {values!r}")
        return _Checked(self.path, f"{place}.", values)


def _is_share(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1


def _is_count(value: object) -> bool:
    return is_whole(value, 0, 2**63 - 1)


def _all(is_right: Callable[[Any], bool], length: int) -> Callable[[Any], bool]:
    """Whether a value is a list of so many right ones."""
    return lambda values: isinstance(values, list) and len(values) == length and all(map(is_right, values))
