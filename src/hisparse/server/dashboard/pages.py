"""The dashboard's addresses: the page, its style and script, and the state that the script asks for every second."""

import time
from functools import partial
from importlib.resources import files
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.responses import JSONResponse, Response

from hisparse.server.dashboard.figures import Figures
from hisparse.server.engine_loop import EngineLoop
from hisparse.server.keys import Check
from hisparse.server.metrics import Metrics

PARTS = {
    "/dashboard": ("index.html", "text/html"),
    "/dashboard/dashboard.css": ("dashboard.css", "text/css"),
    "/dashboard/dashboard.js": ("dashboard.js", "text/javascript"),
    "/dashboard/charts.js": ("charts.js", "text/javascript"),
    "/dashboard/format.js": ("format.js", "text/javascript"),
}
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def add_dashboard(app: FastAPI, loop: EngineLoop, metrics: Metrics, model_name: str, check_key: Check) -> None:
    """Add the dashboard to an application.

    Args:
        loop: what it watches.
        metrics: has the last snapshot of the engine.
        model_name: shown.
        check_key: a dependency that refuses those who may not look.
    """
    figures = Figures()
    loop.watches.append(figures)
    view = State(loop, metrics, figures, model_name)
    guarded = [Depends(check_key)]
    for path, (name, kind) in PARTS.items():
        text = files(__package__).joinpath(name).read_text("utf-8")
        app.add_api_route(path, partial(_part, text, kind), dependencies=guarded, response_model=None)
    app.add_api_route("/dashboard/state", view.answer, dependencies=guarded, response_model=None)


async def _part(text: str, kind: str) -> Response:
    return Response(text, media_type=kind, headers=HEADERS)


class State:
    """What the page shows, as JSON.

    Rates are the page's business: it gets totals, and the time of the server's clock that they belong to.
    """

    def __init__(self, loop: EngineLoop, metrics: Metrics, figures: Figures, model_name: str) -> None:
        self._loop, self._metrics, self._figures, self._model_name = loop, metrics, figures, model_name
        self._started = time.time()

    async def answer(self) -> JSONResponse:
        """Answer /dashboard/state."""
        return JSONResponse(self.read(), headers={"Cache-Control": "no-store"})

    def read(self) -> dict[str, Any]:
        """Everything, by name; seconds and bytes."""
        now, refusal = self._metrics.snapshot, self._loop.refusal
        return {
            "model": self._model_name,
            "started": self._started,  # tells the page that this is another server than before
            "clock": time.monotonic(),
            "refusal": None if refusal is None else str(refusal),
            "unfinished": self._loop.num_unfinished,
            "running": now.running,
            "waiting": now.waiting,
            "retracted": now.retracted,
            "retractions": now.retractions,
            **self._figures.read(),
            "pools": {name: {"used": used, "size": size} for name, (used, size) in now.pools.items()},
            "pool_bytes": self._pool_bytes(),
            "hits": now.hits,
            "misses": now.misses,
            "record_bytes": now.record_bytes,
        }

    def _pool_bytes(self) -> dict[str, int]:
        layout = self._loop.engine.runner.cache.layout
        return {"device_slots": layout.slots_bytes, "host_pages": layout.host_bytes}
