"""Options that several commands share, and what they are made into."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hisparse.config import HiSparseConfig, read_config

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A checkpoint folder, a GGUF file, a model in the local hub cache, or 'smollm2' (fetched once).",
        show_default=False,
    ),
]
PromptOption = Annotated[list[str] | None, typer.Option("--prompt", "-p", help="A prompt. May be repeated.")]
PromptFileOption = Annotated[
    list[str] | None,
    typer.Option(
        "--prompt-file", "-f", help="A UTF-8 text file with one prompt; '-' is standard input. May be repeated."
    ),
]
ChatOption = Annotated[
    bool | None,
    typer.Option("--chat/--raw", help="Wrap prompts in the model's chat template. Default: if it has one."),
]
TopKOption = Annotated[
    int | None, typer.Option("--top-k", help="Tokens each layer reads a step.", show_default="the model's, or 512")
]
BufferOption = Annotated[
    int | None,
    typer.Option(
        "--device-buffer-size", help="Device slots a request and layer; above top-k.", show_default="2 * top-k"
    ),
]
SelectorOption = Annotated[
    str | None,
    typer.Option(
        "--selector",
        help="'auto' (the model's indexer, or else Quest), 'quest', 'dsa', 'attention_mass' (for traces), 'all'.",
        show_default="auto",
    ),
]
PolicyOption = Annotated[
    str | None,
    typer.Option(
        "--policy", help="Which record leaves first: lru, fifo, random, two_rate, two_rate_tier.", show_default="lru"
    ),
]
PrefetchOption = Annotated[
    bool | None,
    typer.Option("--prefetch/--no-prefetch", help="On a GPU: fetch early what layers share.", show_default="prefetch"),
]
ConfigOption = Annotated[
    str | None,
    typer.Option("--hisparse-config", help="Any configuration keys, as a JSON object or the path of one."),
]
MaxTokensOption = Annotated[int, typer.Option("--max-tokens", "-n", help="The most tokens to generate a prompt.")]
DtypeOption = Annotated[str, typer.Option("--dtype", help="float32, bfloat16 or float16.")]
DeviceOption = Annotated[str, typer.Option("--device", help="A torch device.")]
CommitOption = Annotated[
    str | None, typer.Option("--commit", help="The commit to name, where there is no git history.")
]
JsonLinesOption = Annotated[bool, typer.Option("--json", help="Print one JSON line a result, for machines.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object, for machines.")]


def build_config(config: str | None, **options: Any) -> HiSparseConfig:
    """The configuration: keys of `--hisparse-config`, then the options that were given."""
    keys = read_config(config) if config is not None else {}
    return HiSparseConfig.from_mapping(keys | {key: value for key, value in options.items() if value is not None})


def read_prompts(prompts: Sequence[str] | None, files: Sequence[str] | None) -> list[str]:
    """All prompts' texts. Raises `ValueError` if there is none, one is empty, or a file cannot be read."""
    texts = [*(prompts or []), *(read_text(file) for file in files or [])]
    if not texts:
        raise ValueError("there is no prompt: give --prompt TEXT or --prompt-file FILE")
    for text in texts:
        if not text.strip():
            raise ValueError(f"a prompt is empty or blank, got {text!r}")
    return texts


def read_text(file: str) -> str:
    """A UTF-8 file's text; '-' is standard input."""
    try:
        raw = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise ValueError(f"the prompt file {file!r} cannot be read: {error.strerror}") from error
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"the prompt file {file!r} is not UTF-8: byte {raw[error.start]:#04x} at offset {error.start}; "
            f"convert it first"
        ) from error


def print_json(value: object) -> None:
    """One JSON object on one line of standard output."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


def whole_numbers(option: str, given: Sequence[str] | None) -> tuple[int, ...]:
    """The numbers of an option that takes a list, or is repeated, or both."""
    words = [word.strip() for text in given or [] for word in text.split(",")]
    for word in words:
        if not word.isdecimal():
            raise ValueError(f"{option} must be whole numbers, '1,4' for instance, got {word!r}")
    return tuple(int(word) for word in words)
