"""What the scheduler hands to a runner: one forward's worth of work, complete in itself.

A batch holds numbers only, so that another runner can be given the very same schedule; `verify` does.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class PrefillChunk:
    """A piece of one request's prompt."""

    request_id: int
    tokens: tuple[int, ...]
    start: int  # position of the first token
    max_positions: int  # of the request, for whoever sees its first chunk
    is_last: bool  # the prompt ends here: logits are wanted

    @property
    def request_ids(self) -> tuple[int, ...]:
        """The one request, as a `DecodeBatch` names its several."""
        return (self.request_id,)


@dataclass(frozen=True)
class DecodeBatch:
    """One token of each of several requests."""

    request_ids: tuple[int, ...]
    tokens: tuple[int, ...]  # the newest token of each
    positions: tuple[int, ...]  # and its position
    padding: int = 0  # lines beside theirs that nobody takes, up to the size of a recorded step

    @property
    def num_lines(self) -> int:
        """Lines of the forward."""
        return len(self.request_ids) + self.padding


Batch = PrefillChunk | DecodeBatch
