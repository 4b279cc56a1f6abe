"""`hisparse doctor`: what this machine can do, and the commands that install what is missing."""

from dataclasses import asdict

from hisparse.commands.options import JsonOption, print_json
from hisparse.doctor.examination import examine
from hisparse.doctor.finding import Finding

STATUS_WIDTH, NAME_WIDTH = 9, 14


def doctor(as_json: JsonOption = False) -> None:
    """Say what this machine can do: GPU, kernels, host memory, the measured link, the backend that runs.

    Leaves with 0, whatever is missing. A finding is ok, missing or a note.

    --json: a list "findings", each with name, status, says, fix and values; the backend comes last.
    """
    if as_json:
        print_json({"findings": [asdict(finding) for finding in examine()]})
        return
    for finding in examine():
        print(line(finding), flush=True)


def line(finding: Finding) -> str:
    """A finding in aligned columns, with what to do about it below."""
    text = f"{finding.status:{STATUS_WIDTH}}{finding.name:{NAME_WIDTH}}{finding.says}"
    return text if finding.fix is None else f"{text}\n{'':{STATUS_WIDTH + NAME_WIDTH}}fix: {finding.fix}"
