"""Turns in a model's own chat template, as tokens. Used by the commands, the demo's task and the server."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_chat(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Tokens of a chat of one user turn, ready for the answer."""
    return encode_turns(tokenizer, [{"role": "user", "content": text}])


def encode_turns(tokenizer: "PreTrainedTokenizerBase", turns: Sequence[Mapping[str, str]]) -> list[int]:
    """Tokens of a chat, ready for the answer. Each turn has a role and its content."""
    rendered = tokenizer.apply_chat_template(list(turns), tokenize=False, add_generation_prompt=True)
    tokens: list[int] = tokenizer.encode(rendered, add_special_tokens=False)
    return tokens
