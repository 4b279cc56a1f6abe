"""How a tokenizer's tokens become text. Streams decode twice a token, so the way there is short."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from hisparse.errors import HiSparseError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def detokenizer_of(tokenizer: "PreTrainedTokenizerBase") -> Callable[[Sequence[int]], str]:
    """Tokens to text, without special tokens.

    Where transformers would only hand the tokens to the tokenizer under it, that one is called, in a quarter of the
    time.
    """
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    hands_over = (
        issubclass(kind, PreTrainedTokenizerFast)
        and kind.decode is PreTrainedTokenizerBase.decode
        and kind._decode is PreTrainedTokenizerFast._decode
        and not tokenizer.clean_up_tokenization_spaces
    )
    if hands_over:
        return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=True)
    return partial(_decode, tokenizer)


def _decode(tokenizer: "PreTrainedTokenizerBase", tokens: Sequence[int]) -> str:
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    if not isinstance(text, str):
        raise HiSparseError(f"the tokenizer decoded tokens to {type(text).__name__} instead of text")
    return text
