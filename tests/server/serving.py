"""Engines and servers over a tiny checkpoint, and what must hold of them when a test ends."""

import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest
import torch

from hisparse.checkpoint import Loaded
from hisparse.config import HiSparseConfig
from hisparse.engine import Engine, SamplingParams, build_engine
from hisparse.engine.batch import DecodeBatch
from hisparse.engine.runner import Choose, Decoded
from hisparse.server.app import create_app
from hisparse.server.engine_loop import EngineLoop
from hisparse.server.generation import Job
from hisparse.server.serving import Server, bind, url_of

CONTEXT = 512
MODEL = "tiny"
CONFIG = HiSparseConfig(top_k=32, device_buffer_size=48, max_running_requests=3, prefill_chunk=64)
PATIENCE_S = 120.0


def new_engine(loaded: Loaded, config: HiSparseConfig = CONFIG) -> Engine:
    return build_engine(loaded, config, [CONTEXT] * config.max_running_requests, debug=True)


def alone(loaded: Loaded, prompt: Sequence[int], **params: Any) -> str:
    """The text of one request that has an engine to itself."""
    engine = new_engine(loaded)
    request = engine.submit(prompt, SamplingParams(**params))
    engine.run()
    return request.text


def prompt_of(loaded: Loaded, text: str) -> list[int]:
    return list(loaded.tokenizer.encode(text))


def job_of(loaded: Loaded, text: str, **params: Any) -> Job:
    return Job(prompt_of(loaded, text), SamplingParams(**params))


def wait_until(reached: Callable[[], bool], what: str = "it") -> None:
    """Wait for another thread. Fails if it takes too long."""
    end = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < end, f"{what} did not happen in {PATIENCE_S} s"
        time.sleep(0.002)


def assert_nothing_left(loop: EngineLoop) -> None:
    """Once all is quiet: nobody holds anything in the loop, the engine, or the cache."""
    wait_until(lambda: loop.num_unfinished == 0 and loop.engine.scheduler.is_idle, "the end of every request")
    wait_until(lambda: not loop.engine.runner.cache.requests, "the end of every request")
    engine, cache = loop.engine, loop.engine.runner.cache
    cache.check_integrity()
    assert not any(cache.host_pool.pages.references)
    assert cache.selection_state is not None
    assert not any(cache.selection_state.pages.references)
    assert not engine._requests
    assert not engine._sampler._streams


def poison(engine: Engine, monkeypatch: pytest.MonkeyPatch, first: int, last: int = CONTEXT) -> None:
    """The logits of decode steps at these positions are NaN from now on."""
    decode = engine.runner.decode

    def poisoned(batch: DecodeBatch, choose: Choose, meanwhile: Callable[[], None]) -> Decoded:
        bad = [line for line, position in enumerate(batch.positions) if first <= position <= last]
        return decode(
            batch, lambda logits: choose(logits.index_fill(0, torch.tensor(bad).long(), torch.nan)), meanwhile
        )

    monkeypatch.setattr(engine.runner, "decode", poisoned)


class SlowEngine:
    """Makes an engine's steps slow, or lets them wait for a sign, so that a test can act in between."""

    def __init__(self, engine: Engine, seconds: float = 0.005) -> None:
        self._step = engine.step
        self.seconds = seconds
        engine.step = self.step  # type: ignore[method-assign, assignment]

    def step(self, *given: Any) -> Any:
        time.sleep(self.seconds)
        return self._step(*given)


class HeldEngine:
    """Makes an engine's steps wait until `release` is called."""

    def __init__(self, engine: Engine) -> None:
        self._step = engine.step
        self._free = threading.Event()
        self.in_step = threading.Event()
        engine.step = self.step  # type: ignore[method-assign, assignment]

    def step(self, *given: Any) -> Any:
        self.in_step.set()
        assert self._free.wait(PATIENCE_S)
        return self._step(*given)

    def release(self) -> None:
        self._free.set()


class Served:
    """A server on a free port, in a thread of its own."""

    def __init__(
        self, loaded: Loaded, *, max_waiting: int = 64, api_key: str | None = None, drain_s: float = 30.0
    ) -> None:
        self.loop = EngineLoop(new_engine(loaded), max_waiting=max_waiting)
        app = create_app(self.loop, loaded.tokenizer, MODEL, max_context=CONTEXT, api_key=api_key)
        listener = bind("127.0.0.1", 0)
        self.url = url_of(listener)
        self._server = Server(app, self.loop, listener, drain_s=drain_s)
        self._started = threading.Event()
        self._server.on_started = self._started.set
        self.thread = threading.Thread(target=self._server.run_until_signal, daemon=True)
        self.thread.start()
        assert self._started.wait(PATIENCE_S)

    def begin_stop(self) -> None:
        """What a signal does."""
        self._server.should_exit = True

    def stop(self) -> None:
        self.begin_stop()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=PATIENCE_S, **options)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=PATIENCE_S)

    def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Every event but the last, which must say that this is the end."""
        response = self.post(path, body | {"stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert events.pop() == "[DONE]"
        return [json.loads(event) for event in events]
