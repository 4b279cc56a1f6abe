"""Engines over tiny random models, every byte of whose pools is garbage until somebody writes it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hisparse.checkpoint import Loaded, load
from hisparse.checkpoint.tiny import NUM_BYTES, write_tiny
from hisparse.config import HiSparseConfig
from hisparse.engine import Engine, Request, SamplingParams, build_engine
from hisparse.engine.batch import Batch, DecodeBatch, PrefillChunk
from hisparse.engine.build import build_family, dense_family
from hisparse.engine.engine import Observer
from hisparse.engine.family import state_of
from hisparse.engine.resident_runner import ResidentRunner
from hisparse.engine.verification import Verification

GARBAGE = 0xFF  # a NaN in every floating-point dtype
NUM_LAYERS = 4


@dataclass(frozen=True)
class Tiny:
    """A tiny checkpoint that no token stops, in its folder and loaded."""

    folder: Path
    loaded: Loaded


class Checkpoints:
    """Writes a checkpoint when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, Tiny] = {}

    def get(self, architecture: str, dtype: torch.dtype = torch.float32, **options: Any) -> Tiny:
        name = "-".join([architecture, *(f"{key}={value}" for key, value in options.items()), str(dtype)])
        if name not in self._made:
            folder = write_tiny(self._folder / str(len(self._made)), architecture, num_layers=NUM_LAYERS, **options)
            self._made[name] = Tiny(folder, replace(load(folder, dtype=dtype), stop_token_ids=()))
        return self._made[name]


class Record:
    """An observer that keeps every batch and every request's logits."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.logits: dict[int, list[Tensor]] = {}

    def ran(self, batch: Batch, logits: Tensor | None) -> None:
        self.batches.append(batch)
        if logits is not None:
            ids = (batch.request_id,) if isinstance(batch, PrefillChunk) else batch.request_ids
            for request_id, row in zip(ids, logits, strict=True):
                self.logits.setdefault(request_id, []).append(row.clone())

    def finished(self, request_id: int) -> None:
        pass

    @property
    def num_with_logits(self) -> int:
        return sum(not isinstance(batch, PrefillChunk) or batch.is_last for batch in self.batches)

    @property
    def decodes(self) -> list[DecodeBatch]:
        return [batch for batch in self.batches if isinstance(batch, DecodeBatch)]


def garbage_engine(
    loaded: Loaded, config: HiSparseConfig, sizes: Sequence[int], observers: Sequence[Observer] = ()
) -> Engine:
    """An engine in debug mode with room for requests of these sizes, and garbage in all of its memory."""
    engine = build_engine(loaded, config, sizes, observers=observers, debug=True)
    cache = engine.runner.cache
    cache.host_pool.records.fill_(GARBAGE)
    cache.device_pool.records.fill_(GARBAGE)
    cache.workspace._tiles.fill_(GARBAGE)
    state_of(engine.runner.cache).data.view(torch.uint8).fill_(GARBAGE)
    return engine


def verification_of(loaded: Loaded, config: HiSparseConfig, *, dense: bool = False) -> Verification:
    """A verification whose resident run has the engine's selector (and a dense one beside it)."""
    dense_run = ResidentRunner(dense_family(config, loaded.model, loaded.model.config.max_positions)) if dense else None
    return Verification(ResidentRunner(build_family(config, loaded.model)), dense_run)


class VerifiedRun:
    """An engine, its verification, and what a test wants to know of every step."""

    def __init__(self, loaded: Loaded, config: HiSparseConfig, sizes: Sequence[int]) -> None:
        self.verification = verification_of(loaded, config)
        self.record = Record()
        self.engine = garbage_engine(loaded, config, sizes, [self.verification, self.record])
        self.decode_misses: list[int] = []  # of each decode step
        self._misses = 0

    def submit(self, length: int, max_tokens: int = 12, priority: int = 0, **params: Any) -> Request:
        """Queue a random prompt; tokens are sampled, so that histories differ from request to request."""
        sampling = SamplingParams(**({"temperature": 1.0, "seed": length, "max_tokens": max_tokens} | params))
        return self.engine.submit(prompt_of(length), sampling, priority)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            num_decodes = len(self.record.decodes)
            self.engine.step()
            misses = self.engine.runner.cache.statistics().misses
            if len(self.record.decodes) > num_decodes:
                self.decode_misses.append(misses - self._misses)
            self._misses = misses

    def step_until(self, reached: Callable[[], bool]) -> None:
        for _ in range(1000):
            if reached():
                return
            self.step()
        raise AssertionError("1000 steps and not there yet")

    def finish(self, *, fetched: bool = True) -> None:
        """Run to the end and check everything that must hold of a verified run."""
        self.step_until(lambda: self.engine.scheduler.is_idle)
        assert self.verification.equal, self.verification.first_difference
        assert self.verification.steps == self.record.num_with_logits
        assert (sum(self.decode_misses) > 0) == fetched
        assert not self.verification.resident.requests
        assert_clean(self.engine)


def prompt_of(length: int, seed: int | None = None) -> list[int]:
    """Random bytes as tokens; another length is another prompt."""
    generator = torch.Generator().manual_seed(length if seed is None else seed)
    return [int(token) for token in torch.randint(NUM_BYTES, (length,), generator=generator)]


def assert_clean(engine: Engine) -> None:
    """Nothing contradicts anything, and nobody holds anything any more."""
    cache = engine.runner.cache
    cache.check_integrity()
    assert engine.scheduler.is_idle
    assert not cache.requests
    assert not any(cache.host_pool.pages.references)
    assert not any(state_of(engine.runner.cache).pages.references)
    assert (cache.device_pool.tables.row_of_slot == -1).all()
    assert (cache.device_pool.tables.slot_of_row == -1).all()
    assert not engine._requests
    assert not engine.runner._requests
    assert not engine._sampler._streams
