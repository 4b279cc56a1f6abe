"""Sizes as people write them."""

import pytest

from hisparse.plan.quantities import at_least, in_words, parse_bytes, parse_tokens


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("141GB", 141 * 10**9),
        ("141GiB", 141 * 2**30),
        (" 1.5 tb ", 1_500_000_000_000),
        ("2TiB", 2**41),
        ("640kB", 640_000),
        ("7MiB", 7 * 2**20),
        ("4096B", 4096),
    ],
)
def test_bytes(text: str, expected: int) -> None:
    assert parse_bytes("--size", text) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("128K", 131_072), ("128k", 131_072), ("1M", 1_048_576), ("8000", 8000), ("1.5K", 1536)]
)
def test_tokens(text: str, expected: int) -> None:
    assert parse_tokens("--context", text) == expected


@pytest.mark.parametrize(
    "text", ["141", "141G", "GB", "", "-1GB", "0GB", "0.5B", "1e3GB", "1,5GB", "nanGB", "1GB2", "²GB"]
)
def test_what_is_no_size_is_refused_with_what_is_accepted(text: str) -> None:
    with pytest.raises(ValueError, match=r"--size must be a size in B, kB, MB.*such as 141GB.*got ") as error:
        parse_bytes("--size", text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize("text", ["128KB", "0", "-5", "128 tokens", "1G", "9" * 400])
def test_what_is_no_context_is_refused_with_what_is_accepted(text: str) -> None:
    with pytest.raises(ValueError, match=r"--context must be a number of tokens.*K \(1,024\).*got "):
        parse_tokens("--context", text)


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [(0, "0 B"), (999, "999 B"), (10_296, "10.3 kB"), (1_350_000_000, "1.35 GB"), (2e12, "2.00 TB"), (141e9, "141 GB")],
)
def test_in_words(num_bytes: float, words: str) -> None:
    assert in_words(num_bytes) == words


@pytest.mark.parametrize("num_bytes", [1, 10_000_001, 999_999_999, 10**9, 104_730_000_001])
def test_at_least_is_a_size_that_suffices(num_bytes: int) -> None:
    assert num_bytes <= parse_bytes("--size", at_least(num_bytes)) <= num_bytes + 10**7
