"""`hisparse bench`: measurements, each with what it is compared to."""

from typing import Annotated

import typer

from hisparse.commands.options import JsonOption, print_json

app = typer.Typer(help="Measurements, each with what it is compared to.", no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measurements, each with what it is compared to."""


@app.command()
def reference(
    repeats: Annotated[int, typer.Option(help="Calls to time; the median counts.")] = 15,
    as_json: JsonOption = False,
) -> None:
    """A resolve of [8, 512] on the reference backend against copying the same records."""
    from hisparse.bench.reference import measure

    for row in measure(repeats):
        if as_json:
            print_json(row)
        else:
            print(
                f"{row['case']:6} {row['misses']:5} misses: resolve {row['resolve_ms']:.2f} ms, copy of the selected "
                f"records {row['copy_ms']:.2f} ms, ratio {row['ratio']:.2f}"
            )
