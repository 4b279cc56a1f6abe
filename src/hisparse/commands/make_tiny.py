"""`hisparse make-tiny`: a small random checkpoint of any supported family, to try everything on without a download."""

from pathlib import Path
from typing import Annotated

import typer

SEEDS = range(-(2**63), 2**64)  # what torch takes
LLAMA_LIKE = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def make_tiny(
    name: Annotated[
        str, typer.Argument(help="llama, qwen2, qwen3, deepseek-v3.2, glm-5.1 or glm-5.2.", show_default=False)
    ],
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Where to; made if need be, and must be empty.", show_default=False)
    ],
    seed: Annotated[int, typer.Option("--seed", help="Decides the weights.")] = 0,
    notation: Annotated[
        str | None,
        typer.Option(
            "--notation",
            help="How glm-5.2 names shared indexers: types, pattern, pattern-list or frequency.",
            show_default="types",
        ),
    ] = None,
    fp8: Annotated[bool, typer.Option("--fp8", help="FP8 block-scaled weights (deepseek and glm).")] = False,
) -> None:
    """Write a tiny checkpoint with random weights and a byte-level tokenizer, and print its path.

    What it generates is noise, but every command runs on it in seconds, and results compare bit for bit.

    Example: hisparse make-tiny glm-5.2 /tmp/tiny
    """
    from hisparse.checkpoint.tiny import write_tiny
    from hisparse.checkpoint.tiny_mla import FAMILIES, SHARED_INDEXERS, write_tiny_mla

    if name not in LLAMA_LIKE and name not in FAMILIES:
        raise ValueError(f"NAME must be one of {', '.join((*LLAMA_LIKE, *FAMILIES))}, got {name!r}")
    if notation is not None and name not in SHARED_INDEXERS:
        raise ValueError(f"--notation is for {', '.join(SHARED_INDEXERS)}, whose layers share indexers, not for {name}")
    if fp8 and name not in FAMILIES:
        raise ValueError(f"--fp8 is for {', '.join(FAMILIES)}, not for {name}")
    if seed not in SEEDS:
        raise ValueError(f"--seed must be from {SEEDS.start} to {SEEDS.stop - 1}, got {seed}")
    try:
        _check_empty(directory)
        if name in LLAMA_LIKE:
            write_tiny(directory, LLAMA_LIKE[name], seed=seed)
        else:
            write_tiny_mla(directory, name, seed=seed, notation="types" if notation is None else notation, fp8=fp8)
    except OSError as error:
        raise ValueError(f"DIR {directory} cannot be written: {error.strerror or error}") from error
    print(directory)


def _check_empty(directory: Path) -> None:
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"DIR must be a folder, but {directory} is a file")
    if directory.is_dir() and any(directory.iterdir()):
        raise ValueError(f"DIR must be empty, but {directory} holds files; name another or empty it first")
