"""A user's turn in a model's own chat template, as tokens. Used by the commands and by the demo's task."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_chat(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Tokens of a chat of one user turn, ready for the answer."""
    turn = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    tokens: list[int] = tokenizer.encode(rendered, add_special_tokens=False)
    return tokens
