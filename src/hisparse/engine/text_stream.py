"""Turns a request's tokens into text as they come, and watches for stop strings.

A token need not end at a character's boundary, and a tokenizer may decode a token differently after others,
so text is decoded from a short window and held back while its end is not settled.
"""

from collections.abc import Callable, Sequence

UNFINISHED = "\ufffd"  # what a decoder puts for bytes that are no whole character yet


class TextStream:
    """Incremental text of one request.

    Args:
        decode: tokens to text.
        stop: strings that end the text.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._tokens: list[int] = []
        self._window = 0  # tokens from here on are decoded together
        self._read = 0  # tokens before here are in `text`
        self.text = ""
        self.stopped = False
        self._finished = False

    def add(self, token: int) -> None:
        """Take one more token."""
        self._tokens.append(token)
        self._advance()

    def finish(self) -> None:
        """No more tokens come: what was held back is text now."""
        self._finished = True
        self._advance()

    @property
    def settled(self) -> str:
        """The part of `text` that no stop string can still cut off: safe to show."""
        if self.stopped or self._finished:
            return self.text
        longest = max((len(stop) for stop in self._stop), default=0)
        for held in range(min(longest - 1, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-held:]) for stop in self._stop):
                return self.text[:-held]
        return self.text

    def _advance(self) -> None:
        before = self._decode(self._tokens[self._window : self._read])
        whole = self._decode(self._tokens[self._window :])
        if self.stopped or (whole.endswith(UNFINISHED) and not self._finished):
            return
        searched = len(self.text)
        self.text += whole[len(before) :]
        if self._decode(self._tokens[self._read :]):  # a window of tokens without text would lose a leading space
            self._window = self._read
        self._read = len(self._tokens)
        self._cut_at_stop(searched)

    def _cut_at_stop(self, searched: int) -> None:
        """Cut the text before the first stop string; `searched` characters were free of one before."""
        found = [self.text.find(stop, max(searched - len(stop) + 1, 0)) for stop in self._stop]
        places = [place for place in found if place >= 0]
        if places:
            self.text = self.text[: min(places)]
            self.stopped = True
