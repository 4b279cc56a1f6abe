"""Log-probabilities in OpenAI's two shapes: a list of objects in chats, parallel lists in completions."""

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from pydantic import BaseModel

from hisparse.engine.logprobs import ChosenLogprob, TokenLogprob

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNFINISHED = "\ufffd"  # what a decoder puts for bytes that are no whole character
WORD_START = "\u2581"  # how SentencePiece writes a space
REMEMBERED = 1 << 16  # tokens' texts


class TokenChoice(BaseModel):
    """A token that could have been chosen."""

    token: str
    logprob: float
    bytes: list[int] | None


class ContentToken(TokenChoice):
    """A token of a message."""

    top_logprobs: list[TokenChoice]


class ChatLogprobs(BaseModel):
    """Of a message, or of a piece of it."""

    content: list[ContentToken]


class CompletionLogprobs(BaseModel):
    """Of a completion's text, or of a piece of it; one entry a token in each list."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]  # with the chosen token
    text_offset: list[int]  # characters of the whole answer


class LogprobWriter:
    """Writes tokens as text.

    Args:
        tokenizer: the model's.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._text = lru_cache(REMEMBERED)(self._decode)

    def chat(self, tokens: Sequence[ChosenLogprob]) -> ChatLogprobs:
        """The shape of chats."""
        return ChatLogprobs(content=[self._content(one) for one in tokens])

    def completion(self, tokens: Sequence[ChosenLogprob]) -> CompletionLogprobs:
        """The shape of completions."""
        return CompletionLogprobs(
            tokens=[self._text(one.token) for one in tokens],
            token_logprobs=[one.logprob for one in tokens],
            top_logprobs=[self._likeliest(one) for one in tokens],
            text_offset=[one.offset for one in tokens],
        )

    def _content(self, one: ChosenLogprob) -> ContentToken:
        text, top = self._text(one.token), [self._choice(top) for top in one.top]
        return ContentToken(token=text, logprob=one.logprob, bytes=_bytes(text), top_logprobs=top)

    def _choice(self, one: TokenLogprob) -> TokenChoice:
        text = self._text(one.token)
        return TokenChoice(token=text, logprob=one.logprob, bytes=_bytes(text))

    def _likeliest(self, one: ChosenLogprob) -> dict[str, float]:
        """By text; of tokens with the same text the likeliest counts, and the chosen one is always there."""
        by_text: dict[str, float] = {}
        for token, logprob in (*one.top, (one.token, one.logprob)):
            by_text.setdefault(self._text(token), logprob)
        return by_text

    def _decode(self, token: int) -> str:
        text = str(self._tokenizer.decode([token]))
        piece = str(self._tokenizer.convert_ids_to_tokens(token))
        begins_a_word = piece.startswith(WORD_START) and not text.startswith(" ")  # which decoding alone leaves out
        return f" {text}" if begins_a_word else text


def _bytes(text: str) -> list[int] | None:
    """Of a token's text; None for a part of a character, which has none that are text."""
    return None if UNFINISHED in text else list(text.encode())
