"""Tokens become what transformers makes of them, by the short way or the long one."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from hisparse.engine.detokenizer import detokenizer_of
from hisparse.errors import HiSparseError

WORDS = ["<s>", "a", "Ġb", "Ġ,", "c", "Ġ.", "Ã", "©"]  # the last two are the bytes of one character


class Shouting(PreTrainedTokenizerFast):  # type: ignore[misc]  # transformers is untyped here
    """A tokenizer with a way of its own."""

    def decode(self, *arguments: Any, **options: Any) -> str:
        return str(super().decode(*arguments, **options)).upper()


def make(kind: type[PreTrainedTokenizerFast] = PreTrainedTokenizerFast, **options: Any) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="a"))
    tokenizer.decoder = decoders.ByteLevel()
    return kind(tokenizer_object=tokenizer, bos_token="<s>", **options)


KINDS = {
    "handed over": make(),
    "cleaned up": make(clean_up_tokenization_spaces=True),
    "a class of its own": make(Shouting),
}


@given(tokens=st.lists(st.integers(0, len(WORDS) - 1), max_size=12))
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_that_of_transformers(kind: str, tokens: Sequence[int]) -> None:
    tokenizer = KINDS[kind]
    assert detokenizer_of(tokenizer)(tokens) == tokenizer.decode(tokens, skip_special_tokens=True)


def test_the_kinds_differ() -> None:
    texts = {kind: detokenizer_of(tokenizer)([0, 1, 2, 3, 6, 7]) for kind, tokenizer in KINDS.items()}
    assert texts == {"handed over": "a b ,é", "cleaned up": "a b,é", "a class of its own": "A B ,É"}


def test_what_is_no_text_is_an_error() -> None:
    wrong = type("Wrong", (), {"decode": lambda self, tokens, **options: tokens})()
    with pytest.raises(HiSparseError, match="decoded tokens to list instead of text"):
        detokenizer_of(wrong)([1])
