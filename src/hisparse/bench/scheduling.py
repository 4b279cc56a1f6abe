"""What a step costs on the host besides the model: the scheduler's choice, and what the engine does around a forward.

Requests of a tiny random model over a real cache on the CPU. Forwards are left out: a request's state is moved on as
the engine would. `python -m hisparse.bench.scheduling` prints one JSON line a case, in milliseconds.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from hisparse.bench.provenance import commit_here
from hisparse.checkpoint import Loaded, load
from hisparse.checkpoint.tiny import write_tiny
from hisparse.config import HiSparseConfig
from hisparse.engine import Engine, Request, RequestState, SamplingParams, build_engine
from hisparse.engine.batch import PrefillChunk
from hisparse.engine.sampler import Sampler

PROMPT, OUTPUT = 1000, 500  # tokens of a request
VOCABULARY = 32_000
WARM_UP = 5
LONGEST_S = 10.0  # of a part's repeats


def measure(repeats: int, num_running: int = 256) -> Iterator[dict[str, object]]:
    """One row a case: milliseconds of a `schedule`, and of the other parts of a step."""
    with tempfile.TemporaryDirectory() as folder:
        loaded = load(write_tiny(Path(folder)))
    cases = {
        "all decode": _all_decode,
        "a quarter reads prompts": _prompts_beside,
        "as many wait": _as_many_wait,
        "the first in line matters more and lacks host pages": _no_room_for_the_first,
    }
    for case, prepare in cases.items():
        engine = _engine(loaded, num_running)
        prepare(engine, num_running)
        times = [_run_step(engine) for _ in range(WARM_UP + repeats)][WARM_UP:]
        yield {"case": f"schedule: {case}", "running": num_running, **_spread(times)}
    for part, call in _parts(engine).items():
        times = _times(call, repeats)
        yield {"case": part, "running": num_running, **_spread(times)}


def _all_decode(engine: Engine, count: int) -> None:
    _submit(engine, count)
    while len(_in_state(engine, RequestState.DECODING)) < count:
        _run_step(engine)


def _prompts_beside(engine: Engine, count: int) -> None:
    _submit(engine, count)
    while len(_in_state(engine, RequestState.DECODING)) < count * 3 // 4:
        _run_step(engine)
    for request in _in_state(engine, RequestState.PREFILLING):
        request.prompt *= 1000  # more than the measurement can read


def _as_many_wait(engine: Engine, count: int) -> None:
    _all_decode(engine, count)
    _submit(engine, count)


def _no_room_for_the_first(engine: Engine, count: int) -> None:
    _all_decode(engine, count)
    _submit(engine, 1, priority=-1)


def _engine(loaded: Loaded, count: int) -> Engine:
    config = HiSparseConfig(top_k=16, device_buffer_size=17, max_running_requests=count, max_num_batched_tokens=4096)
    return build_engine(loaded, config, [PROMPT + OUTPUT] * count)


def _submit(engine: Engine, count: int, priority: int = 0) -> None:
    for _ in range(count):
        engine.submit([1] * PROMPT, SamplingParams(max_tokens=OUTPUT), priority)


def _in_state(engine: Engine, state: RequestState) -> list[Request]:
    return [request for request in engine.scheduler.running if request.state is state]


def _run_step(engine: Engine) -> float:
    """Milliseconds of one `schedule`, whose forwards then count as done."""
    start = time.perf_counter()
    batches = engine.scheduler.schedule()
    seconds = time.perf_counter() - start
    running = {request.id: request for request in engine.scheduler.running}
    for batch in batches:
        for request in (running[request_id] for request_id in batch.request_ids):
            _move_on(request, batch if isinstance(batch, PrefillChunk) else None)
    return seconds * 1e3


def _move_on(request: Request, chunk: PrefillChunk | None) -> None:
    if chunk is not None:
        request.num_prefilled += len(chunk.tokens)
        if not chunk.is_last:
            return
    request.state = RequestState.DECODING
    if len(request.output) < OUTPUT:
        request.output.append(1)


def _parts(engine: Engine) -> dict[str, Callable[[], object]]:
    """What else the host does for a decode of all requests."""
    requests, cache, sampler = engine.scheduler.running, engine.runner.cache, Sampler()
    logits = 4 * torch.randn(len(requests), VOCABULARY)  # peaked, as a model's are
    return {
        "cache.step: check the requests": lambda: cache.admission.check_can_step(cache.requests),
        f"sample: greedy, of {VOCABULARY} tokens": lambda: sampler.choose(logits, requests),
        "text: a token of each request, nobody looks": lambda: _add_text(requests),
        "text: a token of each request, and all look": lambda: _show_text(requests),
        "one request's retraction": lambda: _retract(engine, requests[-1:]),
        f"sample: at temperature 1, of {VOCABULARY} tokens": lambda: sampler.choose(logits, _warm(requests)),
        f"sample: top_p 0.9, of {VOCABULARY} tokens": lambda: sampler.choose(logits, _warm(requests, top_p=0.9)),
    }


def _add_text(requests: Sequence[Request]) -> None:
    for request in requests:
        request.stream.add(65)


def _show_text(requests: Sequence[Request]) -> None:
    """As a stream to each client does."""
    for request in requests:
        request.stream.add(65)
        assert request.stream.settled


def _warm(requests: Sequence[Request], top_p: float = 1.0) -> Sequence[Request]:
    """The same requests, sampled."""
    params = SamplingParams(temperature=1.0, top_p=top_p, seed=1)
    return [replace(request, params=params) for request in requests]


def _retract(engine: Engine, requests: Sequence[Request]) -> None:
    """It comes back at once."""
    for request in requests:
        engine.retract(request)
    engine.scheduler.schedule()


def _times(call: Callable[[], object], repeats: int) -> list[float]:
    """Fewer where it is slow."""
    for _ in range(WARM_UP):
        call()
    end = time.perf_counter() + LONGEST_S
    times = [_timed(call)]
    while len(times) < repeats and time.perf_counter() < end:
        times.append(_timed(call))
    return times


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def _spread(times: Sequence[float]) -> dict[str, float]:
    return {"median_ms": round(statistics.median(times), 3), "worst_ms": round(max(times), 3)}


if __name__ == "__main__":
    for row in measure(repeats=300):
        print(json.dumps(row | {"commit": commit_here()}), flush=True)
