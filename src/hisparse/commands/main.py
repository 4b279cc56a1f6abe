"""The entry point: collects the commands and turns errors into messages and exit codes.

0: done. 1: `verify` or `demo` found a difference, or the demo no answer. 2: bad input or a failure that has a
message. 130: interrupted. 141: nobody reads the output any more.
"""

import os
import sys
from collections.abc import Sequence

import typer

from hisparse.commands import bench, demo, doctor, fetch, generate, make_tiny, plan, serve, trace, verify
from hisparse.errors import HiSparseError

INTERRUPTED = 130
CLOSED_PIPE = 141  # as a shell says it of others

app = typer.Typer(
    name="hisparse",
    help="Long-context generation with top-k sparse attention: the full KV history in host memory, a small "
    "pool of recently selected records on the device, outputs unchanged.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(demo.demo)
app.command()(doctor.doctor)
app.command()(fetch.fetch)
app.command()(generate.generate)
app.command()(make_tiny.make_tiny)
app.command()(plan.plan)
app.command()(serve.serve)
app.command()(verify.verify)
app.add_typer(bench.app, name="bench")
app.add_typer(trace.app, name="trace")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        app(args=list(arguments) if arguments is not None else None)
    except SystemExit as left:  # typer turns Ctrl-C into this code, without a word
        if left.code == INTERRUPTED:
            _leave("interrupted", INTERRUPTED)
        if isinstance(left.__context__, BrokenPipeError):  # for which typer has 1, as `verify` has for a difference
            sys.exit(CLOSED_PIPE)
        raise
    except (HiSparseError, ValueError) as error:
        _leave(f"error: {error}", 2)
    except Exception as error:  # what no check at a boundary caught: still one line; the class tells where to look
        _leave(f"error: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}", 2)


def _leave(message: str, code: int) -> None:
    print(message, file=sys.stderr)
    sys.exit(code)
