"""Tokens to text as they come: characters split over tokens, and stop strings wherever they fall."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparse.engine.text_stream import UNFINISHED, TextStream

# Tokens of a made-up vocabulary: every byte, then pieces of several bytes, then one that stands for no text.
PIECES = [*(bytes([byte]) for byte in range(256)), b"ab", b"END", b"ND.", "é".encode(), "日本".encode(), b""]
SILENT = len(PIECES) - 1


def decode_bytes(tokens: list[int]) -> str:
    return b"".join(PIECES[token] for token in tokens).decode("utf-8", errors="replace")


def decode_words(tokens: list[int]) -> str:
    """Words with a space before each but the first of all, as older tokenizers do; token 0 is no text."""
    return "".join(f" {'abc'[token - 1]}" for token in tokens if token)[1:]


def stream_of(tokens: Sequence[int], stop: Sequence[str] = ()) -> TextStream:
    """The stream after all tokens (a stop string ends it sooner) and its end."""
    stream = TextStream(decode_bytes, stop)
    for token in tokens:
        if not stream.stopped:
            stream.add(token)
    stream.finish()
    return stream


def test_nothing() -> None:
    stream = stream_of([])
    assert (stream.text, stream.settled, stream.stopped) == ("", "", False)


@pytest.mark.parametrize("character", ["é", "€", "🙂", "👩‍🚀"])
def test_a_character_split_over_tokens_is_held_back(character: str) -> None:
    stream = TextStream(decode_bytes)
    seen = []
    for byte in f"a{character}b".encode():
        stream.add(byte)
        seen.append(stream.text)
    assert all(f"a{character}b".startswith(text) for text in seen)
    assert seen[0] == seen[1] == "a"
    assert seen[-1] == f"a{character}b"


def test_a_character_that_never_ends_comes_with_the_end() -> None:
    stream = TextStream(decode_bytes)
    for byte in "a€".encode()[:-1]:
        stream.add(byte)
    assert stream.text == "a"
    stream.finish()
    assert stream.text == "a" + UNFINISHED


def test_bytes_that_are_no_text_do_not_hold_back_what_follows() -> None:
    stream = TextStream(decode_bytes)
    for byte in b"a\xff\xfeb":
        stream.add(byte)
    assert stream.text == f"a{UNFINISHED}{UNFINISHED}b"


def test_a_token_without_text() -> None:
    assert stream_of([SILENT, 97, SILENT, SILENT, 98, SILENT]).text == "ab"


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        ([b"a", b"END", b"b"], "a"),  # a token of its own
        ([b"a", b"E", b"ND."], "a"),  # over tokens, ending inside one
        ([b"x", b"ab", b"END"], "xab"),
        ([b"END"], ""),
        ([b"E", b"END"], "E"),
        ([b"E", b"N", b"E", b"N", b"D"], "EN"),
    ],
)
def test_a_stop_string_is_not_part_of_the_text(pieces: list[bytes], text: str) -> None:
    stream = stream_of([PIECES.index(piece) for piece in pieces], ["END"])
    assert stream.stopped
    assert stream.text == stream.settled == text


def test_a_stop_string_inside_one_token() -> None:
    stream = TextStream(lambda tokens: "".join("say STOP now" for _ in tokens), ["STOP"])
    stream.add(0)
    assert (stream.text, stream.stopped) == ("say ", True)


def test_the_first_of_several_stop_strings_cuts() -> None:
    stream = TextStream(lambda tokens: "".join("one two three" for _ in tokens), ["three", "two"])
    stream.add(0)
    assert stream.text == "one "


def test_a_stop_string_of_split_characters() -> None:
    stream = stream_of(list("a日本b".encode()), ["日本"])
    assert (stream.text, stream.stopped) == ("a", True)


def test_a_stop_string_that_only_the_end_completes() -> None:
    """Held back as an unfinished character, it is text when no more tokens come."""
    stream = stream_of([97, 0xE2], [UNFINISHED])
    assert (stream.text, stream.stopped) == ("a", True)


def test_settled_text_holds_back_what_may_become_a_stop_string() -> None:
    stream = TextStream(decode_bytes, ["END", "NOW"])
    settled = []
    for byte in b"aENEN.N":
        stream.add(byte)
        settled.append(stream.settled)
    assert settled == ["a", "a", "a", "aEN", "aEN", "aENEN.", "aENEN."]
    assert stream.text == "aENEN.N"


def test_nothing_is_held_back_without_stop_strings() -> None:
    stream = TextStream(decode_bytes)
    stream.add(69)
    assert stream.settled == stream.text == "E"


def test_everything_is_settled_after_the_end() -> None:
    assert stream_of(list(b"the E"), ["END"]).settled == "the E"


tokens_of_bytes = st.lists(st.integers(0, len(PIECES) - 1), max_size=40)
tokens_of_few = st.lists(st.sampled_from([*b"aENDb.", *range(256, len(PIECES))]), max_size=40)


@given(st.one_of(tokens_of_bytes, tokens_of_few))
def test_streaming_equals_decoding_at_once(tokens: list[int]) -> None:
    assert stream_of(tokens).text == decode_bytes(tokens)


@given(tokens_of_few, st.lists(st.booleans(), min_size=40, max_size=40))
def test_the_text_does_not_depend_on_when_it_is_looked_at(tokens: list[int], looks: list[bool]) -> None:
    often, seldom = TextStream(decode_bytes), TextStream(decode_bytes)
    for token, look in zip(tokens, looks, strict=False):
        often.add(token)
        seldom.add(token)
        text = often.text  # after every token
        if look:
            assert seldom.text == text
    seldom.finish()
    assert seldom.text == decode_bytes(tokens)


def test_nothing_is_decoded_before_somebody_looks() -> None:
    decoded: list[list[int]] = []
    stream = TextStream(lambda tokens: decoded.append(tokens) or decode_bytes(tokens))  # type: ignore[func-returns-value]
    for byte in b"abc":
        stream.add(byte)
    assert not decoded
    assert stream.text == "abc"
    stream.finish()
    assert len(decoded) == 2


@given(st.text(max_size=30))
def test_streaming_text_byte_by_byte(text: str) -> None:
    assert stream_of(list(text.encode())).text == text


@given(tokens_of_few, st.sampled_from(["END", "D", "ab", "aa", "ND.E", "é", "本日"]))
def test_streaming_cuts_where_decoding_at_once_would(tokens: list[int], stop: str) -> None:
    text = decode_bytes(tokens)
    stream = stream_of(tokens, [stop])
    assert stream.text == text.split(stop)[0]
    assert stream.stopped == (stop in text)


@given(tokens_of_few, st.lists(st.sampled_from(["END", "NDE", "ab", "bE", "DEN."]), min_size=1, unique=True))
def test_settled_text_only_grows_and_is_in_the_end(tokens: list[int], stops: list[str]) -> None:
    stream, settled = TextStream(decode_bytes, stops), [""]
    for token in tokens:
        if not stream.stopped:
            stream.add(token)
            settled.append(stream.settled)
    stream.finish()
    for earlier, later in zip(settled, [*settled[1:], stream.text], strict=True):
        assert later.startswith(earlier)
    assert not any(stop in shown for stop in stops for shown in [*settled, stream.text])


@given(st.lists(st.integers(1, 3), max_size=12))
def test_streaming_words_keeps_the_spaces_between(tokens: list[int]) -> None:
    stream = TextStream(decode_words)
    for token in tokens:
        stream.add(token)
    assert stream.text == decode_words(tokens)


def test_streaming_words_keeps_the_space_after_a_token_without_text() -> None:
    stream = TextStream(decode_words)
    for token in (1, 0, 2):
        stream.add(token)
    assert stream.text == decode_words([1, 0, 2]) == "a b"
