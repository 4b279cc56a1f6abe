"""How often a hidden sentence is found: dense attention beside Quest, over documents, depths and aggregations.

Run as `python -m hisparse.bench.needles DOCUMENT...`. Each document is read once a depth (prefill is dense
in every case); then the same question is answered under every setting from the same records, so the settings
differ in nothing but what they select. LOG.md records the table; the demo's setting was chosen from it.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from hisparse.checkpoint import Loaded, load
from hisparse.engine.batch import DecodeBatch, PrefillChunk
from hisparse.engine.build import grouped_family
from hisparse.engine.family import Resident
from hisparse.engine.grouped import GroupedFamily
from hisparse.engine.resident_runner import ResidentRunner
from hisparse.models.llama import Llama
from hisparse.needle import PASSWORD, ask, hide
from hisparse.selectors import AGGREGATIONS, AllPositions, Quest, Selector

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
CHUNK = 512
MAX_TOKENS = 16


class Setting(NamedTuple):
    """One way of selecting."""

    top_k: int | None  # None: dense attention
    aggregation: str = ""
    per_kv_head: bool = False

    def selector(self, model: Llama, context: int) -> Selector:
        """A selector for contexts of up to `context` tokens."""
        if self.top_k is None:
            return AllPositions(context)
        return Quest(
            top_k=self.top_k,
            num_kv_heads=model.config.num_kv_heads,
            head_dim=model.config.head_dim,
            dtype=model.dtype,
            aggregation=self.aggregation,
            per_kv_head=self.per_kv_head,
        )


SETTINGS = (
    Setting(None),
    *(Setting(top_k, aggregation) for top_k in (256, 512) for aggregation in AGGREGATIONS),
    *(Setting(top_k, "softmax_sum", per_kv_head=True) for top_k in (256, 512)),
)


def sweep(loaded: Loaded, name: str, document: str, num_tokens: int) -> Iterator[dict[str, object]]:
    """One row for each depth and setting: whether the answer holds the code."""
    for depth in DEPTHS:
        prompt = ask(loaded.tokenizer, hide(loaded.tokenizer, document, depth, num_tokens))
        reader = Reader(loaded, prompt)
        for setting in SETTINGS:
            answer = reader.answer(setting)
            yield {
                "document": name,
                "tokens": len(prompt),
                "depth": depth,
                "top_k": setting.top_k,
                "aggregation": setting.aggregation,
                "per_kv_head": setting.per_kv_head,
                "found": PASSWORD in answer,
                "answer": answer,
            }


class Reader:
    """A prompt that was read once and can be answered many times."""

    def __init__(self, loaded: Loaded, prompt: Sequence[int]) -> None:
        self._loaded = loaded
        self._prompt = prompt
        self._context = len(prompt) + MAX_TOKENS
        runner = self._runner(Setting(CHUNK, "max"))
        for start in range(0, len(prompt), CHUNK):
            tokens = tuple(prompt[start : start + CHUNK])
            last = start + len(tokens) == len(prompt)
            logits = runner.run(PrefillChunk(0, tokens, start, self._context, last))
        assert logits is not None
        self._first_token = int(logits.argmax())
        self._read = runner.requests[0]

    def answer(self, setting: Setting) -> str:
        """The greedy answer under one setting."""
        runner = self._runner(setting)
        runner.requests[0] = self._copy(setting)
        tokens = [self._first_token]
        while tokens[-1] not in self._loaded.stop_token_ids and len(tokens) < MAX_TOKENS:
            position = len(self._prompt) + len(tokens) - 1
            logits = runner.run(DecodeBatch((0,), (tokens[-1],), (position,)))
            assert logits is not None
            tokens.append(int(logits.argmax()))
        text: str = self._loaded.tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def _runner(self, setting: Setting) -> ResidentRunner:
        return ResidentRunner(self._family(setting))

    def _family(self, setting: Setting) -> GroupedFamily:
        assert isinstance(self._loaded.model, Llama)
        return grouped_family(self._loaded.model, setting.selector(self._loaded.model, self._context))

    def _copy(self, setting: Setting) -> Resident:
        """What was read, as this setting keeps it; decoding writes to it."""
        records, state = self._read.records, self._read.state
        if setting.per_kv_head:
            key, value = self._family(Setting(None)).records.unpack(records)  # [layers, positions, kv, d]
            records = torch.stack((key, value), dim=2).permute(0, 3, 1, 2, 4).flatten(3).contiguous().view(torch.uint8)
            records = records.flatten(0, 1)  # a cache layer for each KV head
        return Resident(records.clone(), state.clone() if setting.top_k else state.new_empty(*state.shape[:2], 0))


def main(paths: Sequence[str]) -> None:
    """Print one JSON line a row for each document."""
    loaded = load("smollm2")
    for path in paths:
        for row in sweep(loaded, Path(path).stem, Path(path).read_text(encoding="utf-8"), 6200):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
