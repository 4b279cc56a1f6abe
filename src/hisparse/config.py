"""The configuration of a hierarchical engine: a frozen dataclass whose keys are the names users know.

Read from command-line options or from JSON (`--hisparse-config`); unknown keys are errors that name the
nearest valid one.
"""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

SELECTORS = ("auto", "quest", "dsa", "attention_mass", "all")
CACHE_DTYPES = ("auto", "fp8")
DEFAULT_TOP_K = 512
RATIO_LIMIT = 1e9  # host rows over device slots; above it a mistake


@dataclass(frozen=True)
class HiSparseConfig:
    """What the cache and its selector are built with.

    Args:
        top_k: tokens that each layer reads a step. Default: what the model's indexer was trained to read, or 512.
        device_buffer_size: B, slots a request in each layer; above top_k. Default: 2 * top_k.
        max_running_requests: requests on the device at once.
        host_to_device_ratio: host rows over device slots. Default: enough for the prompts at hand.
        selector: "quest"; "dsa", the model's own indexer; "attention_mass", the positions that dense attention weighs
            most (for traces; costs dense attention); "all" for dense attention through the sparse path; or "auto", what
            the model has: its indexer, or else Quest. An indexer reads at most what its model was trained to.
        prefetch: on a GPU, fetch what layers share with their anchor as soon as the anchor's misses are known.
        cuda_graph: on a GPU, record the decode step of each size of batch and replay it.
        policy: which record leaves the device pool first: "lru", "fifo", "random", "two_rate", or "two_rate_tier", the
            same with what the selector ranks next.
        seed_positions: when a prompt is read and the device pool is too small for everything, fetch so many of the
            positions that its last query ranks highest, before the first token is decoded. Default: top_k; 0: none.
        quest_aggregation: how heads that share a Quest selection agree.
        quest_per_kv_head: a Quest selection for each KV head instead of one a layer.
        kv_cache_dtype: "auto", the model's, or "fp8" for the 656-byte records of latent attention.
        index_cache_dtype: of an indexer's keys: "auto", the model's, or "fp8", 132 bytes a token a layer, not 256.
        prefill_chunk: tokens of a prompt that one forward takes.
        max_num_batched_tokens: tokens of a step: one for each request that decodes, the rest for chunks of prompts.
            More reads prompts faster and answers slower. Default, and least: max_running_requests + prefill_chunk.

    Raises:
        ValueError: a value that cannot work, with the reason.
    """

    top_k: int | None = None
    device_buffer_size: int | None = None
    max_running_requests: int = 4
    host_to_device_ratio: float | None = None
    selector: str = "auto"
    policy: str = "lru"
    seed_positions: int | None = None
    quest_aggregation: str = "max"
    quest_per_kv_head: bool = False
    kv_cache_dtype: str = "auto"
    index_cache_dtype: str = "auto"
    prefetch: bool = True
    cuda_graph: bool = True
    prefill_chunk: int = 512
    max_num_batched_tokens: int | None = None

    def __post_init__(self) -> None:
        from hisparse.order import POLICIES  # here, so that --help does not wait for torch
        from hisparse.selectors.quest import AGGREGATIONS, QUEST_PAGE

        for name in ("max_running_requests", "prefill_chunk", "top_k", "device_buffer_size", "max_num_batched_tokens"):
            if getattr(self, name) is not None or name in ("max_running_requests", "prefill_chunk"):
                _check_whole(name, getattr(self, name), least=1)
        if self.top_k and self.device_buffer_size and self.device_buffer_size <= self.top_k:
            raise ValueError(
                f"device_buffer_size must be above top_k {self.top_k}, so that a selection and the newest record fit, "
                f"got {self.device_buffer_size}: use at least {self.top_k + 1}, {2 * self.top_k} is a good start"
            )
        if self.seed_positions is not None:
            _check_whole("seed_positions", self.seed_positions, least=0)
        self._check_step_tokens()
        ratio = self.host_to_device_ratio
        if ratio is not None and not _is_positive(ratio):
            raise ValueError(f"host_to_device_ratio must be a finite number above 0, got {ratio!r}")
        _check_choice("selector", self.selector, SELECTORS)
        _check_choice("kv_cache_dtype", self.kv_cache_dtype, CACHE_DTYPES)
        _check_choice("index_cache_dtype", self.index_cache_dtype, CACHE_DTYPES)
        _check_choice("policy", self.policy, POLICIES)
        _check_choice("quest_aggregation", self.quest_aggregation, AGGREGATIONS)
        for name in ("quest_per_kv_head", "prefetch", "cuda_graph"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}")
        if self.selector == "quest" and self.top_k and self.top_k < QUEST_PAGE:
            raise ValueError(f"top_k must be at least {QUEST_PAGE} (one Quest page), got {self.top_k}")

    def _check_step_tokens(self) -> None:
        least = self.max_running_requests + self.prefill_chunk
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < least:
            raise ValueError(
                f"max_num_batched_tokens must be at least max_running_requests {self.max_running_requests} + "
                f"prefill_chunk {self.prefill_chunk} = {least}, so that neither answers nor prompts ever wait for the "
                f"other, got {self.max_num_batched_tokens}: raise it, or lower prefill_chunk"
            )

    @property
    def step_tokens(self) -> int:
        """Tokens that a step may run."""
        return self.max_num_batched_tokens or self.max_running_requests + self.prefill_chunk

    def top_k_for(self, trained: int | None) -> int:
        """Tokens that a layer reads, with a model whose indexer was `trained` to read so many (None: it has none)."""
        wanted = self.top_k or trained or DEFAULT_TOP_K
        return min(wanted, trained) if trained else wanted

    def buffer_for(self, top_k: int) -> int:
        """B, with selections of `top_k`."""
        return self.device_buffer_size or 2 * top_k

    def seeds_for(self, top_k: int) -> int:
        """Positions of a layer that are fetched when a prompt is read, with selections of `top_k`."""
        wanted = top_k if self.seed_positions is None else self.seed_positions
        return min(wanted, self.buffer_for(top_k))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "HiSparseConfig":
        """Build from a mapping. Raises `ValueError` for an unknown key, with the nearest valid one."""
        valid = [field.name for field in fields(cls)]
        for key in values:
            if key not in valid:
                near = difflib.get_close_matches(str(key), valid, n=1, cutoff=0.4)
                hint = f"did you mean {near[0]!r}?" if near else f"valid keys: {', '.join(valid)}"
                raise ValueError(f"unknown configuration key {key!r}; {hint}")
        return cls(**values)


def read_config(text_or_path: str) -> dict[str, Any]:
    """The keys of a JSON object, given as text or as the path of a file. Raises `ValueError`."""
    text = text_or_path
    if not text.lstrip().startswith("{"):
        try:
            text = Path(text_or_path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"--hisparse-config takes a JSON object or the path of one, got {text_or_path!r} ({error})"
            ) from error
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"the configuration is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"the configuration must be a JSON object, got {type(values).__name__}")
    return values


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < RATIO_LIMIT


def _check_whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")


def _check_choice(name: str, value: object, choices: Any) -> None:
    if not isinstance(value, str) or value not in choices:
        near = difflib.get_close_matches(str(value), list(choices), n=1, cutoff=0.6)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}{hint}")
