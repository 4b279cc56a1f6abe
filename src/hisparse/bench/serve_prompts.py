"""Prompts for the serving bench: random ones of a fixed length, the same for the same seed, or those of a file."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Protocol

Content = str | list[int] | list[dict[str, Any]]  # text, tokens, or a chat's messages

WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work number night point home water room mother area money "
    "story fact month lot right study book eye job word business issue side kind head house service friend father"
)


@dataclass(frozen=True)
class Prompt:
    """What one request asks."""

    content: Content
    max_tokens: int | None = None  # None: what all requests ask for

    @property
    def is_messages(self) -> bool:
        """Whether it is a chat."""
        return isinstance(self.content, list) and isinstance(self.content[0], dict)


class Prompts(Protocol):
    """Where requests get their prompts."""

    @property
    def kind(self) -> str:
        """For people: what the prompts are."""

    def prompt(self, number: int) -> Prompt:
        """The prompt of a request, the same whenever it is asked for."""


@dataclass(frozen=True)
class TokenPrompts:
    """Random tokens: exactly as long as asked for.

    Args:
        length: tokens.
        seed: decides which.
        first, last: the smallest and the largest token.
    """

    length: int
    seed: int
    first: int
    last: int
    kind: str = "random token ids"

    def prompt(self, number: int) -> Prompt:
        """Random tokens."""
        tokens = range(self.first, self.last + 1)
        return Prompt(Random(f"{self.seed} {number}").choices(tokens, k=self.length))


@dataclass(frozen=True)
class TextPrompts:
    """Random words: about as many tokens as asked for, since only the server knows its tokenizer.

    Args:
        num_words: words of a prompt.
        seed: decides which.
    """

    num_words: int
    seed: int
    kind: str = "random text"

    def prompt(self, number: int) -> Prompt:
        """Random words."""
        return Prompt(" ".join(Random(f"{self.seed} {number}").choices(WORDS.split(), k=self.num_words)))


@dataclass(frozen=True)
class FilePrompts:
    """A file's prompts in their order, over and over."""

    prompts: Sequence[Prompt]
    kind: str = "file"

    def prompt(self, number: int) -> Prompt:
        """The prompt whose turn it is."""
        return self.prompts[number % len(self.prompts)]


def read_file(path: Path) -> FilePrompts:
    """A file's prompts.

    `.jsonl`: a line is a string, a list of tokens, or an object with "prompt" (one of these) or "messages", and
    "max_tokens" if it asks for its own number. Any other name: a line is a text. Blank lines are passed over.
    Raises `ValueError` that names the line.
    """
    try:
        lines = path.read_text("utf-8").split("\n")
    except OSError as error:
        raise ValueError(f"--prompts {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompts {path} is not UTF-8: convert it first") from error
    numbered = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ValueError(f"--prompts {path} has no prompt: give one a line")
    if path.suffix != ".jsonl":
        return FilePrompts([Prompt(line) for _, line in numbered], kind=f"{len(numbered)} of {path.name}")
    prompts = [_from_json(line, f"--prompts {path}, line {number}") for number, line in numbered]
    return FilePrompts(prompts, kind=f"{len(prompts)} of {path.name}")


def _from_json(line: str, where: str) -> Prompt:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    fields = value if isinstance(value, dict) else {"prompt": value}
    content: Any = fields.get("messages", fields.get("prompt"))
    if not _is_content(content, chat="messages" in fields):
        raise ValueError(
            f'{where} must be a string, a list of tokens, or an object with "prompt" or "messages", got {line[:80]}'
        )
    max_tokens = fields.get("max_tokens")
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise ValueError(f"{where}: max_tokens must be a whole number of at least 1, got {max_tokens!r}")
    return Prompt(content, max_tokens)


def _is_content(content: object, *, chat: bool) -> bool:
    if isinstance(content, str):
        return bool(content) and not chat
    kind = dict if chat else int
    return isinstance(content, list) and bool(content) and all(type(one) is kind for one in content)
