"""Where requests get their room. The scheduler asks in terms of requests; the runner's cache has the answers."""

from collections.abc import Sequence
from typing import Protocol

from hisparse.engine.request import Request, RequestState
from hisparse.engine.runner import Runner
from hisparse.errors import IntegrityError
from hisparse.layout import num_pages_for


class Residency(Protocol):
    """What the scheduler asks for. A request is admitted once and retired once; in between it may be retracted."""

    def fits(self, request: Request, retracting: Sequence[Request] = ()) -> bool:
        """Whether a waiting request can be admitted, or a retracted one resumed, once `retracting` are retracted.

        Raises `NeverFitsError` if a waiting request would not fit an empty cache either.
        """

    def admit(self, request: Request) -> None:
        """Reserve everything that a request which fits will ever need."""

    def resume(self, request: Request) -> None:
        """Put a retracted request that fits back."""

    def retract(self, request: Request) -> None:
        """Take a request off the device, keeping its history."""

    def retire(self, request: Request) -> None:
        """Let a request go, on the device or off it."""


class CacheResidency:
    """The room that a runner's cache has: reservations, host pages, and pages of selection state.

    A retracted request keeps its host pages and nothing else, so retracting others can make up for a reservation or for
    selection-state pages that are missing, and never for host pages.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._cache = runner.cache

    def fits(self, request: Request, retracting: Sequence[Request] = ()) -> bool:
        """Whether it can be admitted or resumed once `retracting` are retracted. Raises `NeverFitsError`."""
        is_new = request.state is RequestState.WAITING
        if is_new and self._runner.can_admit(request.max_positions):
            return True
        pages = num_pages_for(request.max_positions)
        if is_new and pages > self._cache.host_pool.pages.num_free:
            return False
        return self._has_reservation(retracting) and pages <= self._state_pages(retracting, otherwise=pages)

    def admit(self, request: Request) -> None:
        """Reserve what the request will need."""
        self._runner.admit(request.id, request.max_positions)

    def resume(self, request: Request) -> None:
        """Put it back."""
        if not self._runner.resume(request.id):
            raise IntegrityError(f"request {request.id} should fit and does not; please report this")

    def retract(self, request: Request) -> None:
        """Take it off the device."""
        self._runner.retract(request.id)

    def retire(self, request: Request) -> None:
        """Free what it held."""
        self._runner.retire(request.id)

    def _has_reservation(self, retracting: Sequence[Request]) -> bool:
        return bool(retracting or self._cache.admission.free_index)

    def _state_pages(self, retracting: Sequence[Request], otherwise: int) -> int:
        """Those that would be free; `otherwise` for a cache without selection state."""
        state = self._cache.selection_state
        if state is None:
            return otherwise
        return state.pages.num_free + sum(num_pages_for(request.max_positions) for request in retracting)
