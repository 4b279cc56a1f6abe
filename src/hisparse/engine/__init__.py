"""The engine: scheduling, model execution and sampling, kept apart (docs/architecture.md)."""

from hisparse.engine.build import build_engine
from hisparse.engine.engine import Engine
from hisparse.engine.request import FinishReason, Request, RequestState, SamplingParams

__all__ = ["Engine", "FinishReason", "Request", "RequestState", "SamplingParams", "build_engine"]
