"""A sentence hidden in a long document, and the question that asks for it: the demo's task.

The word is arbitrary and stands nowhere else, so an answer that holds it was read, not guessed.
"""

from typing import TYPE_CHECKING

from hisparse.chat import encode_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PASSWORD = "heliotrope"
NEEDLE = f"The secret password of the lamp room is {PASSWORD}."
QUESTION = "What is the secret password of the lamp room?"


def hide(tokenizer: "PreTrainedTokenizerBase", document: str, depth: float, num_tokens: int | None = None) -> str:
    """Put the needle between two paragraphs of the document.

    Args:
        tokenizer: to count with.
        document: paragraphs separated by blank lines.
        depth: 0 to 1, how far into the text.
        num_tokens: cut the document after about this many tokens. Default: all of it.
    """
    if num_tokens is not None:
        document = tokenizer.decode(tokenizer.encode(document, add_special_tokens=False)[:num_tokens])
    paragraphs = document.split("\n\n")
    target = depth * len(document)
    seen = 0
    for place, paragraph in enumerate(paragraphs):  # noqa: B007 -- the place is what is wanted
        if seen >= target:
            break
        seen += len(paragraph) + 2
    return "\n\n".join([*paragraphs[:place], NEEDLE, *paragraphs[place:]])


def ask(tokenizer: "PreTrainedTokenizerBase", document: str) -> list[int]:
    """Tokens of a chat that shows the document and asks for the needle."""
    text = f"Read the text below. A password is hidden in it.\n\n{document}\n\n{QUESTION}"
    return encode_chat(tokenizer, text)
