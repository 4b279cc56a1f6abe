"""What a selector knows beyond its selection: an order of the best positions, for policies, seeding and traces."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Ranking(NamedTuple):
    """The best positions of one query a request, in order."""

    positions: Tensor  # int32 [b, n] (or [b, groups, n]), best first, -1 pads last
    scores: Tensor  # float32 of the same shape, as the selector ranks them, -inf at pads; Quest's newest page has +inf

    def of_group(self, group: int) -> "Ranking":
        """One selection group's, [b, n]."""
        return Ranking(self.positions[:, group], self.scores[:, group])


Best = Callable[[int], Ranking]  # so many of the best; to be asked before the selector's state moves on
