"""Reads single values out of a config.json dictionary, so that every complaint about one sounds the same.

Checkpoint configurations are written by others. `llama_config.py` and `rope.py` take every value from them
through these functions; a wrong one raises a `CheckpointError` with the key, the value and the expectation. A key
of a table inside is named with dots, `rope_parameters.factor` for instance.

Sizes have limits far above any model's, because some are counted up to before a weight is looked at.
"""

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from hisparse.errors import CheckpointError

Config = Mapping[str, Any]

LARGEST_SIZE = 2**31 - 1
MOST_LAYERS = 1_000


def architecture_of(config: Config, known: Iterable[str]) -> str:
    """The first of `architectures` that is known."""
    named = config.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(one, str) for one in named):
        raise CheckpointError(f"config.json: architectures must be a list of names, got {named!r}")
    supported = list(known)
    for architecture in named:
        if architecture in supported:
            return str(architecture)
    raise CheckpointError(f"config.json: architectures {named!r} is not supported; supported: {', '.join(supported)}")


def positive_int(config: Config, key: str, default: int | None = None, *, most: int = LARGEST_SIZE) -> int:
    """`config[key]`, or `default` where the key is missing or null.

    Raises `CheckpointError` for anything else than an integer from 1 to `most`.
    """
    value = _value(config, key, default, "a positive integer")
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise CheckpointError(f"config.json: {key} must be a positive integer, got {value!r}")
    if value > most:
        raise CheckpointError(f"config.json: {key} must be at most {most:,}, got {value:,}")
    return value


def positive_float(config: Config, key: str, default: float | None = None) -> float:
    """`config[key]` as a float, or `default` where the key is missing or null.

    Raises `CheckpointError` for anything else than a finite number above 0; Python reads NaN and Infinity from JSON.
    """
    expected = "a finite number above 0"
    value = _value(config, key, default, expected)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max:
        return float(value)
    raise CheckpointError(f"config.json: {key} must be {expected}, got {value!r}")


def boolean(config: Config, key: str, default: bool) -> bool:
    """`config[key]`, or `default` where the key is missing or null."""
    value = _value(config, key, default, "true or false")
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json: {key} must be true or false, got {value!r}")
    return value


def token_ids(config: Config, key: str) -> tuple[int, ...]:
    """`config[key]`, one id or a list of ids; empty where the key is missing or null."""
    value = config.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise CheckpointError(f"config.json: {key} must be a token id or a list of them, got {value!r}")
    return tuple(ids)


def _value(config: Config, key: str, default: object, expected: str) -> object:
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"config.json: {key} is missing; expected {expected}")
    return value
