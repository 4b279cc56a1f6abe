"""Turns a request's tokens into text as they come, and watches for stop strings.

A token need not end at a character's boundary, and a tokenizer may decode a token differently after others,
so text is decoded from a short window and held back while its end is not settled.
"""

from collections.abc import Callable, Sequence

UNFINISHED = "\ufffd"  # what a decoder puts for bytes that are no whole character yet


class TextStream:
    """Incremental text of one request. Without stop strings, nothing is decoded before somebody looks at the text.

    Args:
        decode: tokens to text.
        stop: strings that end the text.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._tokens: list[int] = []
        self._window = 0  # tokens from here on are decoded together
        self._read = 0  # tokens before here are in the text
        self._tried = 0  # tokens before here are in it, or held back
        self._before = ""  # the text of the window's tokens that are read
        self._text = ""
        self.stopped = False
        self._finished = False

    def add(self, token: int) -> None:
        """Take one more token."""
        self._tokens.append(token)
        if self._stop:
            self._advance()

    def finish(self) -> None:
        """No more tokens come: what was held back is text now."""
        self._finished = True
        self._tried = self._read
        if self._stop:
            self._advance()

    @property
    def text(self) -> str:
        """The text so far, without what a stop string cuts off."""
        self._advance()
        return self._text

    @property
    def settled(self) -> str:
        """The part of `text` that no stop string can still cut off: safe to show."""
        text = self.text
        if self.stopped or self._finished or not self._stop:
            return text
        longest = max(len(stop) for stop in self._stop)
        for held in range(min(longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-held:]) for stop in self._stop):
                return text[:-held]
        return text

    def _advance(self) -> None:
        """Bring the text up to date: as far as it ends with a whole character."""
        if self.stopped:
            return
        ends = range(len(self._tokens), self._tried, -1)
        self._tried = len(self._tokens)
        for end in ends:
            whole = self._decode(self._tokens[self._window : end])
            if self._finished or not whole.endswith(UNFINISHED):
                self._take(whole, end)
                return

    def _take(self, whole: str, end: int) -> None:
        """`whole` is the text of the window's tokens up to `end`."""
        searched = len(self._text)
        self._text += whole[len(self._before) :]
        tail = self._decode(self._tokens[self._read : end])
        if tail:  # a window of tokens without text would lose a leading space
            self._window, self._before = self._read, tail
        else:
            self._before = whole
        self._read = end
        if self._stop:
            self._cut_at_stop(searched)

    def _cut_at_stop(self, searched: int) -> None:
        """Cut the text before the first stop string; `searched` characters were free of one before."""
        found = [self._text.find(stop, max(searched - len(stop) + 1, 0)) for stop in self._stop]
        places = [place for place in found if place >= 0]
        if places:
            self._text = self._text[: min(places)]
            self.stopped = True
