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

from torch import Tensor

from hisparse.attention import GroupedRecords
from hisparse.checkpoint import Loaded, load
from hisparse.engine.batch import DecodeBatch, PrefillChunk
from hisparse.engine.resident_runner import ResidentRunner
from hisparse.needle import CODE, ask, hide
from hisparse.selectors import AGGREGATIONS, AllPositions, Quest, Selector

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
CHUNK = 512
MAX_TOKENS = 24


class Setting(NamedTuple):
    """One way of selecting."""

    top_k: int | None  # None: dense attention
    aggregation: str = ""

    def selector(self, loaded: Loaded, context: int) -> Selector:
        """A selector for contexts of up to `context` tokens."""
        if self.top_k is None:
            return AllPositions(context)
        shape = loaded.model.config
        return Quest(
            top_k=self.top_k,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=loaded.model.dtype,
            aggregation=self.aggregation,
        )


SETTINGS = (
    Setting(None),
    *(Setting(top_k, aggregation) for top_k in (256, 512, 1024) for aggregation in AGGREGATIONS),
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
                "found": CODE in answer,
                "answer": answer,
            }


class Reader:
    """A prompt that was read once and can be answered many times."""

    def __init__(self, loaded: Loaded, prompt: Sequence[int]) -> None:
        self._loaded = loaded
        self._prompt = prompt
        shape = loaded.model.config
        self._context = len(prompt) + MAX_TOKENS
        records = GroupedRecords(shape.num_kv_heads, shape.head_dim, loaded.model.dtype)
        self._runner = ResidentRunner(loaded.model, Setting(CHUNK, "max").selector(loaded, self._context), records)
        self._logits = self._read()
        self._state = self._runner._requests[0].state

    def answer(self, setting: Setting) -> str:
        """The greedy answer under one setting."""
        self._runner.selector = setting.selector(self._loaded, self._context)
        resident = self._runner._requests[0]
        resident.state = self._state.clone() if setting.top_k else self._state[..., :0].flatten(2)
        tokens = [int(self._logits.argmax())]
        while tokens[-1] not in self._loaded.stop_token_ids and len(tokens) < MAX_TOKENS:
            position = len(self._prompt) + len(tokens) - 1
            logits = self._runner.run(DecodeBatch((0,), (tokens[-1],), (position,)))
            assert logits is not None
            tokens.append(int(logits.argmax()))
        text: str = self._loaded.tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def _read(self) -> Tensor:
        logits = None
        for start in range(0, len(self._prompt), CHUNK):
            tokens = tuple(self._prompt[start : start + CHUNK])
            last = start + len(tokens) == len(self._prompt)
            logits = self._runner.run(PrefillChunk(0, tokens, start, self._context, last))
        assert logits is not None
        return logits


def main(paths: Sequence[str]) -> None:
    """Print one JSON line a row for each document."""
    loaded = load("smollm2")
    for path in paths:
        for row in sweep(loaded, Path(path).stem, Path(path).read_text(encoding="utf-8"), 6200):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
