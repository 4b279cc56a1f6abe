"""Runs the model over the hierarchical cache: a prefill chunk or a decode step in, logits out.

How a kind of model attends, and what it asks of the cache, is its family's business (family.py); here requests
have places in the cache, and batches become forwards. On a GPU a decode step is one CUDA graph for each size of batch.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hisparse.admission import CacheRequest
from hisparse.cache import HierarchicalCache
from hisparse.engine.batch import DecodeBatch, PrefillChunk
from hisparse.engine.family import Family
from hisparse.errors import CapacityError
from hisparse.step import Step

Choose = Callable[[Tensor], Tensor]


class Decoded(NamedTuple):
    """What a decode step made."""

    logits: Tensor  # float32 [b, vocab]
    tokens: list[int]  # as they were chosen from the logits


def _likeliest(logits: Tensor) -> Tensor:
    return logits.argmax(dim=-1)


def nothing() -> None:
    """What there is to do meanwhile, unless a caller says."""


class Runner:
    """Executes batches and keeps each request's place in the cache.

    Args:
        family: the model, and how it attends.
        cache: of the family's shape, with a selection state.
        records: record the decode step of each size in a CUDA graph, and replay it from its second use on. The family
            must be one that can be recorded.
        seeds: when a prompt is read, fetch so many of the positions that its last query ranks highest, if the device
            cannot have everything.
    """

    def __init__(self, family: Family, cache: HierarchicalCache, *, records: bool = False, seeds: int = 0) -> None:
        self.family = family
        self.model = family.model
        self.cache = cache
        self._requests: dict[int, CacheRequest] = {}
        self._records = records
        self._seeds = seeds
        self._recorded: dict[int, RecordedStep] = {}  # by lines
        self._pool: Any = None  # torch's handle of the graphs' memory

    # Residency: see engine/scheduler.py

    def can_admit(self, max_positions: int) -> bool:
        """Whether there is room now. Raises `NeverFitsError` if there never will be."""
        return self.cache.can_admit(max_positions)

    def admit(self, request_id: int, max_positions: int) -> None:
        """Reserve what the request will need."""
        self._requests[request_id] = self.cache.admit(max_positions)

    def retire(self, request_id: int) -> None:
        """Free what the request held."""
        self.cache.retire(self._requests.pop(request_id))

    def retract(self, request_id: int) -> None:
        """Take the request off the device."""
        self.cache.retract(self._requests[request_id])

    def resume(self, request_id: int) -> bool:
        """Put it back if there is room."""
        try:
            self.cache.resume(self._requests[request_id])
        except CapacityError:
            return False
        return True

    # Forwards

    def warm_up(self, sizes: Sequence[int]) -> None:
        """Record the steps of these sizes now, if steps are recorded, so that nobody waits for it later."""
        for size in sizes if self._records else ():
            request = self.cache.admit(1)
            self._decode([request], [0], size, _likeliest, nothing)
            self.cache.retire(request)

    def prefill(self, chunk: PrefillChunk) -> Tensor | None:
        """Take in a piece of a prompt; logits [1, vocab] float32 after its last piece."""
        with self._on_device(), self._forgetting_failures():
            return self._prefill(chunk)

    def decode(
        self, batch: DecodeBatch, choose: Choose = _likeliest, meanwhile: Callable[[], None] = nothing
    ) -> Decoded:
        """One token of each request.

        Args:
            batch: the requests, with their newest tokens.
            choose: logits [b, vocab] float32 to tokens int64 [b], on a GPU without waiting for it.
            meanwhile: what to do while the GPU is busy with the step; it must not raise.

        Raises:
            ValueError: a batch for other positions than the cache is at.
            ModelOutputError: selections by scores that are not finite.
        """
        requests = [self._requests[request_id] for request_id in batch.request_ids]
        lengths = tuple(request.length for request in requests)
        if lengths != batch.positions:
            raise ValueError(f"the batch is for positions {batch.positions}, and the cache is at {lengths}")
        return self._decode(requests, batch.tokens, batch.num_lines, choose, meanwhile)

    @torch.inference_mode()
    def _prefill(self, chunk: PrefillChunk) -> Tensor | None:
        tokens = torch.tensor(chunk.tokens, device=self.model.device)
        positions = torch.arange(chunk.start, chunk.start + len(tokens), device=self.model.device)
        seeds = self._seeds if chunk.is_last and not self.cache.has_slots_for_all(len(tokens)) else 0
        hidden = self.family.forward_chunk(self.cache, self._requests[chunk.request_id], tokens, positions, seeds=seeds)
        self.family.check_selections()
        return self.model.logits(hidden[-1:]) if chunk.is_last else None

    @torch.inference_mode()
    def _decode(
        self,
        requests: Sequence[CacheRequest],
        tokens: Sequence[int],
        size: int,
        choose: Choose,
        meanwhile: Callable[[], None],
    ) -> Decoded:
        """A size's first step is run as it is, which compiles and loads all it needs."""
        recorded = self._recorded.get(size)
        observer = self.cache.observer  # it sees what is run, not what is recorded or replayed
        observed = observer is not None and observer.hears(requests)
        with self._on_device(), self._forgetting_failures():
            if recorded is not None and not observed:
                return self._replay(recorded, requests, tokens, choose, meanwhile)
            meanwhile()  # launching takes as long as the GPU
            decoded = self._run(requests, tokens, size, choose)
        if self._records and recorded is None and not observed:
            with self._on_device():
                self._try_to_record(size)
        return decoded

    @contextmanager
    def _forgetting_failures(self) -> Iterator[None]:
        """A forward that fails leaves no failed selections behind for the next one."""
        try:
            yield
        except BaseException:
            with suppress(Exception):
                self.family.check_selections()
            raise

    def _on_device(self) -> AbstractContextManager[object]:
        """The model's GPU is the current one: captures and kernels go by that, and it is each thread's own."""
        return torch.cuda.device(self.model.device) if self.model.device.type == "cuda" else nullcontext()

    def _replay(
        self,
        recorded: "RecordedStep",
        requests: Sequence[CacheRequest],
        tokens: Sequence[int],
        choose: Choose,
        meanwhile: Callable[[], None],
    ) -> Decoded:
        with self.cache.step(requests, tokens=tokens, recorded=recorded.step):
            recorded.graph.replay()
            logits = recorded.logits[: len(requests)].clone()
            arriving = self._send(choose(logits))
            meanwhile()
        return self._receive(logits, arriving)

    def _run(self, requests: Sequence[CacheRequest], tokens: Sequence[int], size: int, choose: Choose) -> Decoded:
        with self.cache.step(requests, tokens=tokens, batch_size=size) as step:
            hidden = self.family.forward_step(self.cache, step, step.tokens)
            logits = self.model.logits(hidden)[: len(requests)]
            arriving = self._send(choose(logits))
        return self._receive(logits, arriving)

    def _send(self, chosen: Tensor) -> Tensor:
        """Let what was chosen, and what failed, come to the CPU. It is there when the device was next waited for."""
        failures = self.family.failures
        words = chosen if failures is None else torch.cat((chosen, failures.long()[None]))
        if words.device.type == "cpu":
            return words
        return torch.empty(words.shape, dtype=words.dtype, pin_memory=True).copy_(words, non_blocking=True)

    def _receive(self, logits: Tensor, arrived: Tensor) -> Decoded:
        """The end of the step waited for the device, and that was the only time."""
        chosen = arrived.tolist()
        self.family.check_selections(*chosen[len(logits) :])
        return Decoded(logits, chosen[: len(logits)])

    def _try_to_record(self, size: int) -> None:
        """A step that cannot be recorded can still be run: the requests have their tokens, and go on."""
        try:
            self._recorded[size] = self._record(size)
        except Exception as error:
            self._records = False
            warnings.warn(
                f"decode steps are not recorded from now on, which makes them slower: one of {size} requests could not "
                f"be ({type(error).__name__}: {error}). Say cuda_graph false to run without",
                stacklevel=2,
            )

    def _record(self, size: int) -> "RecordedStep":
        graph = torch.cuda.CUDAGraph()
        # other threads may use the GPU meanwhile; the graphs run one at a time, so they share their memory
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            with self.cache.record_step(size) as step:
                hidden = self.family.forward_step(self.cache, step, step.tokens)
            logits = self.model.logits(hidden)
        self._pool = graph.pool()
        return RecordedStep(graph, step, logits)


class RecordedStep(NamedTuple):
    """A decode step of so many lines in a CUDA graph."""

    graph: torch.cuda.CUDAGraph
    step: Step
    logits: Tensor  # float32 [lines, vocab]


def buckets_up_to(max_requests: int) -> tuple[int, ...]:
    """Sizes that steps are recorded in: 1, 2, 4, then every eighth, and the largest."""
    sizes = (1, 2, 4, *range(8, max_requests, 8))
    return (*(size for size in sizes if size < max_requests), max_requests)
