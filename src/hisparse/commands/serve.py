"""`hisparse serve`: an OpenAI-compatible server, with bounded device memory."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hisparse.commands.options import (
    BufferOption,
    ConfigOption,
    DeviceOption,
    DtypeOption,
    ModelArgument,
    PolicyOption,
    PrefetchOption,
    SelectorOption,
    TopKOption,
    build_config,
)
from hisparse.commands.progress import say
from hisparse.commands.recording import check_recording, recording
from hisparse.commands.session import load_model, make_engine
from hisparse.config import HiSparseConfig

if TYPE_CHECKING:
    from hisparse.checkpoint import Loaded
    from hisparse.engine import Engine

PACKAGES = ("fastapi", "uvicorn", "prometheus_client")
LAST_PORT = 65535


def serve(
    model: ModelArgument,
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 is every one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at; 0 takes a free one.")] = 8000,
    api_key: Annotated[str | None, typer.Option(help="What clients must send as their key.")] = None,
    max_waiting: Annotated[int, typer.Option(help="Requests that may wait; more get status 429.")] = 256,
    max_running_requests: Annotated[
        int | None, typer.Option(help="Requests on the device at once.", show_default="4")
    ] = None,
    max_context: Annotated[
        int | None,
        typer.Option(
            help="The most tokens a request can have, with its answer; sizes the host pool.", show_default="the model's"
        ),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients call the model.", show_default="MODEL")
    ] = None,
    drain_seconds: Annotated[float, typer.Option(help="How long requests may go on after SIGTERM.")] = 30.0,
    record_traces: Annotated[
        Path | None, typer.Option(help="A folder for traces of what layers select; see `hisparse trace`.")
    ] = None,
    record_every: Annotated[int, typer.Option(help="Record the first request and then every so-manieth.")] = 10,
    top_k: TopKOption = None,
    device_buffer_size: BufferOption = None,
    selector: SelectorOption = None,
    policy: PolicyOption = None,
    prefetch: PrefetchOption = None,
    hisparse_config: ConfigOption = None,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "cpu",
) -> None:
    """Serve a model to clients of OpenAI's API, until SIGTERM or Ctrl-C.

    Example: hisparse serve smollm2, and then a client with base_url="http://127.0.0.1:8000/v1"
    """
    _check(port, max_waiting, max_context, drain_seconds, api_key)
    check_recording(record_traces, record_every)
    config = build_config(
        hisparse_config,
        top_k=top_k,
        device_buffer_size=device_buffer_size,
        selector=selector,
        policy=policy,
        prefetch=prefetch,
        max_running_requests=max_running_requests,
    )
    listener = _listen(host, port)  # a port that is taken should be known before a large model is loaded
    loaded = load_model(model, dtype, device)
    context = min(max_context or loaded.model.config.max_positions, loaded.model.config.max_positions)
    engine = _build(loaded, config, context)
    with _saying_where(host, port):  # another server may have been as early and faster since
        listener.listen()
    with recording(engine, record_traces, record_every):
        _run(loaded, engine, context, served_model_name or model, listener, api_key, max_waiting, drain_seconds)


def _check(port: int, max_waiting: int, max_context: int | None, drain_seconds: float, api_key: str | None) -> None:
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise ValueError(f"serving needs {', '.join(missing)}: pip install 'hisparse[serve]'")
    if not 0 <= port <= LAST_PORT:
        raise ValueError(f"--port must be from 0 to {LAST_PORT}, got {port}")
    if max_waiting < 1:
        raise ValueError(f"--max-waiting must be at least 1, got {max_waiting}")
    if max_context is not None and max_context < 2:
        raise ValueError(f"--max-context must be at least 2 (a token and its answer), got {max_context}")
    if not 0 <= drain_seconds < float("inf"):
        raise ValueError(f"--drain-seconds must be 0 or more, got {drain_seconds}")
    if api_key is not None and not api_key.strip():
        raise ValueError("--api-key is blank: leave it out, or give a key")


def _listen(host: str, port: int) -> socket.socket:
    from hisparse.server.serving import bind

    with _saying_where(host, port):
        return bind(host, port)


@contextmanager
def _saying_where(host: str, port: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"cannot listen at --host {host} --port {port}: {error.strerror}") from error


def _build(loaded: "Loaded", config: HiSparseConfig, context: int) -> "Engine":
    engine = make_engine(loaded, config, [context] * config.max_running_requests)
    engine.runner.warm_up(engine.scheduler.buckets)
    layout = engine.runner.cache.layout
    say(
        f"device KV {layout.device_kv_bytes / 1e6:.1f} MB, host pool {layout.host_bytes / 1e6:.1f} MB: "
        f"{layout.max_requests} requests of {context:,} tokens run together"
    )
    return engine


def _run(
    loaded: "Loaded",
    engine: "Engine",
    context: int,
    model_name: str,
    listener: socket.socket,
    api_key: str | None,
    max_waiting: int,
    drain_seconds: float,
) -> None:
    from hisparse.server.app import create_app
    from hisparse.server.engine_loop import EngineLoop
    from hisparse.server.serving import Server, url_of

    loop = EngineLoop(engine, max_waiting=max_waiting)
    app = create_app(loop, loaded.tokenizer, model_name, max_context=context, api_key=api_key)
    server = Server(app, loop, listener, drain_s=drain_seconds)
    server.on_started = lambda: say(f"serving {model_name} at {url_of(listener)}/v1")
    server.run_until_signal()
    say("stopped: every request finished or was told")
