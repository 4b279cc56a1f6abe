"""The web application: OpenAI's paths, errors in OpenAI's form, health, metrics and the dashboard."""

import logging
import time
from typing import TYPE_CHECKING, Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from hisparse.errors import HiSparseError
from hisparse.server.dashboard.pages import add_dashboard
from hisparse.server.endpoints import Endpoints
from hisparse.server.engine_loop import EngineLoop
from hisparse.server.errors import ApiError, as_api_error
from hisparse.server.keys import Check, check_browser, check_program
from hisparse.server.metrics import Metrics
from hisparse.server.prompts import PromptReader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CLIENT_GONE = 499  # what proxies log for it; nobody reads this answer


def create_app(
    loop: EngineLoop,
    tokenizer: "PreTrainedTokenizerBase",
    model_name: str,
    *,
    max_context: int,
    api_key: str | None = None,
) -> FastAPI:
    """An application over an engine loop. Starting and stopping the loop is the caller's business.

    Args:
        loop: generates; its metrics are served.
        tokenizer: the model's.
        model_name: what clients call the model.
        max_context: positions of the longest request, prompt and answer; cut to what the cache can hold.
        api_key: what clients must send for everything under /v1 and for the dashboard; None: nothing.
    """
    app = FastAPI(title="hisparse", docs_url=None, redoc_url=None, openapi_url=None)
    context = min(max_context, loop.engine.runner.cache.layout.max_positions)
    reader = PromptReader(tokenizer, loop.engine.runner.model.config.vocab_size, context)
    endpoints = Endpoints(loop, reader, model_name, context)
    metrics = Metrics()
    loop.watches.append(metrics)
    _answer_errors(app)
    _add_v1(app, endpoints, check_program(api_key))
    _add_state(app, loop, metrics)
    add_dashboard(app, loop, metrics, model_name, check_browser(api_key))
    return app


def _add_v1(app: FastAPI, endpoints: Endpoints, check_key: Check) -> None:
    guarded = [Depends(check_key)]
    card = {"id": endpoints.model_name, "object": "model", "created": int(time.time()), "owned_by": "hisparse"}

    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card | {"max_model_len": endpoints.max_context}]}

    async def model(name: str) -> dict[str, Any]:
        if name != endpoints.model_name:
            raise ApiError(f"the model {name!r} is not here", status=404, param="model", code="model_not_found")
        return card

    routes: tuple[tuple[str, Any, str], ...] = (
        ("/v1/completions", endpoints.complete, "POST"),
        ("/v1/chat/completions", endpoints.chat, "POST"),
        ("/v1/models", models, "GET"),
        ("/v1/models/{name:path}", model, "GET"),
    )
    for path, endpoint, method in routes:
        app.add_api_route(path, endpoint, methods=[method], dependencies=guarded, response_model=None)


def _add_state(app: FastAPI, loop: EngineLoop, metrics: Metrics) -> None:
    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> JSONResponse:
        refusal = loop.refusal
        if refusal is not None:
            return JSONResponse({"status": "unavailable", "reason": str(refusal)}, status_code=503)
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def show_metrics() -> Response:
        return Response(metrics.text(loop.num_unfinished), media_type=metrics.content_type)


def _answer_errors(app: FastAPI) -> None:
    """Every error in the same form."""

    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, ClientDisconnect):
            return Response(status_code=CLIENT_GONE)
        if isinstance(error, HTTPException):
            message, headers = f"{request.method} {request.url.path}: {error.detail}", error.headers
            error = ApiError(message, status=error.status_code, headers=dict(headers) if headers else None)
        known = as_api_error(error)
        if known.status >= 500:
            logging.getLogger(__name__).error("%s failed: %r", request.url.path, error)
        return JSONResponse(known.body(), status_code=known.status, headers=known.headers)

    for kind in (ApiError, HiSparseError, ClientDisconnect, HTTPException, Exception):
        app.add_exception_handler(kind, answer)
