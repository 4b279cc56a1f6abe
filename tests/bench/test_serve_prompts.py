"""Prompts of the serving bench: the same for the same seed, and files that say which of their lines is wrong."""

from pathlib import Path

import pytest

from hisparse.bench.serve_prompts import Prompt, TextPrompts, TokenPrompts, read_file


def test_random_tokens_have_their_length_and_repeat() -> None:
    prompts = TokenPrompts(50, seed=3, first=100, last=200)
    first = prompts.prompt(0).content
    assert len(first) == 50
    assert all(isinstance(token, int) and 100 <= token <= 200 for token in first)
    assert prompts.prompt(0) == TokenPrompts(50, seed=3, first=100, last=200).prompt(0)
    assert prompts.prompt(1).content != first
    assert TokenPrompts(50, seed=4, first=100, last=200).prompt(0).content != first


def test_random_text_has_so_many_words() -> None:
    text = TextPrompts(12, seed=1).prompt(5).content
    assert isinstance(text, str)
    assert len(text.split()) == 12


def test_a_text_file_has_a_prompt_a_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\n  two\u2028half \r\n", "utf-8")
    prompts = read_file(file)
    assert [prompts.prompt(number).content for number in range(3)] == ["one", "two\u2028half", "one"]


def test_a_jsonl_file_has_its_forms(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '"text"\n[1, 2]\n{"prompt": "p", "max_tokens": 7}\n{"messages": [{"role": "user", "content": "c"}]}\n'
    )
    prompts = read_file(file).prompts
    assert [prompt.content for prompt in prompts[:3]] == ["text", [1, 2], "p"]
    assert [prompt.max_tokens for prompt in prompts] == [None, None, 7, None]
    assert [prompt.is_messages for prompt in prompts] == [False, False, False, True]
    assert prompts[3] == Prompt([{"role": "user", "content": "c"}])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no prompt"),
        ('"ok"\n{"prompt": ', "line 2 is not JSON"),
        ('{"text": "p"}', "line 1 must be a string, a list of tokens"),
        ("[]", "line 1 must be"),
        ('[1, "a"]', "line 1 must be"),
        ("3", "line 1 must be"),
        ('{"messages": "hello"}', "line 1 must be"),
        ('{"prompt": "p", "max_tokens": 0}', "max_tokens must be a whole number of at least 1, got 0"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_file(file)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        read_file(tmp_path / "none.txt")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_file(tmp_path / "latin.txt")
