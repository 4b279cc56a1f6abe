"""Rotary position embedding, in the variants that Llama and Qwen checkpoints use.

`llama_config.py` reads a `RopeConfig` out of config.json; the model turns it into one tensor of inverse
frequencies when it is built, and rotates every layer's queries and keys with the cosines and sines of a
step's positions. A variant is one function from `RopeConfig` to frequencies. All are checked against transformers.

Sources: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071), the Llama 3.1 reference code for llama3.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hisparse.errors import CheckpointError
from hisparse.models.config_values import Config, boolean, positive_float, positive_int

DEFAULT_THETA = 10_000.0


@dataclass(frozen=True)
class RopeConfig:
    """One variant and its numbers; a variant ignores those that it does not name."""

    variant: str = "default"
    theta: float = DEFAULT_THETA
    factor: float = 1.0  # linear, llama3, yarn: how many times longer the context became
    original_max_positions: int = 0  # llama3, yarn: the context before that
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn: dimensions that turn more often than this keep their frequency
    beta_slow: float = 1.0  # yarn: those that turn less often are interpolated
    truncate: bool = True  # yarn: round the two bounds to whole dimensions
    attention_factor: float = 1.0  # yarn: multiplies cosines and sines
    divisors: tuple[float, ...] = ()  # divisors: one for each frequency, as GGUF files store llama3

    def __post_init__(self) -> None:
        if self.theta <= 1:
            raise CheckpointError(f"config.json: rope_theta must be above 1, got {self.theta}")
        if self.low_freq_factor >= self.high_freq_factor:
            raise CheckpointError(
                f"config.json: low_freq_factor {self.low_freq_factor} must be below "
                f"high_freq_factor {self.high_freq_factor}"
            )

    @classmethod
    def from_dict(cls, config: Config) -> "RopeConfig":
        """Read `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (transformers 4).

        Raises `CheckpointError` for a variant that is not supported, or for a missing or senseless number.
        """
        name = rope_table_name(config)
        table = _rope_table(config, name)
        theta = positive_float(config, f"{name}.rope_theta", positive_float(config, "rope_theta", DEFAULT_THETA))
        variant = table.get("rope_type", table.get("type", "default"))
        if variant not in list(INVERSE_FREQUENCIES):
            supported = ", ".join(INVERSE_FREQUENCIES)
            raise CheckpointError(
                f"config.json: rope type {variant!r} is not supported; supported: {supported}. "
                "Use a checkpoint of the same model without this context extension."
            )
        return cls(variant=variant, theta=theta, **_numbers(variant, name, config))


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Radians a position for each pair of dimensions: [head_dim / 2] float32, on the CPU."""
    return INVERSE_FREQUENCIES[config.variant](config, head_dim)


def cosines_and_sines(
    inverse_frequency: Tensor,  # [head_dim / 2] float32
    positions: Tensor,  # [t] int64
    attention_factor: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines for `rotate`, each [t, 1, head_dim / 2]; angles are computed in float32."""
    angles = positions[:, None, None].float() * inverse_frequency
    return (angles.cos() * attention_factor).to(dtype), (angles.sin() * attention_factor).to(dtype)


def rotate(vectors: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate [t, heads, head_dim]: dimension i is paired with dimension i + head_dim / 2."""
    first, second = vectors.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)


def rope_table_name(config: Config) -> str:
    """The key of the table that holds rope's numbers, if there is one."""
    return "rope_scaling" if config.get("rope_scaling") else "rope_parameters"


def _rope_table(config: Config, name: str) -> dict[str, Any]:
    table = config.get(name) or {}
    if not isinstance(table, dict) or any(isinstance(value, dict) for value in table.values()):
        raise CheckpointError(
            f"config.json: {name} must be one table for all layers, got {table!r}; "
            "models with a rope of their own for each kind of layer are not supported"
        )
    for place in (table, config):
        share = place.get("partial_rotary_factor")
        if share not in (None, 1, 1.0):
            raise CheckpointError(f"config.json: partial_rotary_factor must be 1 or absent, got {share!r}")
    return table


def _numbers(variant: str, name: str, config: Config) -> dict[str, Any]:
    """What a variant needs beside theta, out of the table of this name."""
    if variant == "default":
        return {}
    if variant == "divisors":
        return {"divisors": _checked_divisors(config[name].get("divisors"))}
    if variant == "linear":
        return {"factor": positive_float(config, f"{name}.factor")}
    max_positions = positive_int(config, "max_position_embeddings")
    # A value beside the table wins over the one inside, as in transformers.
    original = positive_int(config, f"{name}.original_max_position_embeddings", max_positions)
    original = positive_int(config, "original_max_position_embeddings", original)
    if variant == "llama3":
        return {
            "factor": positive_float(config, f"{name}.factor"),
            "original_max_positions": original,
            "low_freq_factor": positive_float(config, f"{name}.low_freq_factor"),
            "high_freq_factor": positive_float(config, f"{name}.high_freq_factor"),
        }
    # null leaves the factor to the two lengths; without the key transformers loads nothing, not even a tokenizer
    factor = positive_float(config, f"{name}.factor", max_positions / original if "factor" in config[name] else None)
    return {
        "factor": factor,
        "original_max_positions": original,
        "beta_fast": positive_float(config, f"{name}.beta_fast", 32.0),
        "beta_slow": positive_float(config, f"{name}.beta_slow", 1.0),
        "truncate": boolean(config, f"{name}.truncate", True),
        "attention_factor": positive_float(
            config, f"{name}.attention_factor", _yarn_attention_factor(config, name, factor)
        ),
    }


def _checked_divisors(values: object) -> tuple[float, ...]:
    if not isinstance(values, list) or not all(isinstance(value, float) and 0 < value < math.inf for value in values):
        raise CheckpointError(f"rope divisors must be finite numbers above 0, got {values!r}")
    return tuple(values)


def _yarn_attention_factor(config: Config, name: str, factor: float) -> float:
    """YaRN, section 3.4, in DeepSeek's generalisation: both scales of config.json, or neither, count."""
    if config[name].get("mscale") and config[name].get("mscale_all_dim"):
        scale = _yarn_scale(factor, positive_float(config, f"{name}.mscale"))
        return scale / _yarn_scale(factor, positive_float(config, f"{name}.mscale_all_dim"))
    return _yarn_scale(factor, 1.0)


def _yarn_scale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _default(config: RopeConfig, head_dim: int) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / config.theta**exponents


def _linear(config: RopeConfig, head_dim: int) -> Tensor:
    return _default(config, head_dim) / config.factor


def _divisors(config: RopeConfig, head_dim: int) -> Tensor:
    if len(config.divisors) != head_dim // 2:
        raise CheckpointError(
            f"rope divisors: expected {head_dim // 2} for head_dim {head_dim}, got {len(config.divisors)}"
        )
    return _default(config, head_dim) / torch.tensor(config.divisors, dtype=torch.float32)


def _llama3(config: RopeConfig, head_dim: int) -> Tensor:
    frequency = _default(config, head_dim)
    turns = config.original_max_positions * frequency / (2 * math.pi)  # over the original context
    low, high = config.low_freq_factor, config.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)  # 1: fast, unchanged; 0: slow, divided by the factor
    return kept * frequency + (1 - kept) * frequency / config.factor


def _yarn(config: RopeConfig, head_dim: int) -> Tensor:
    first, last = _yarn_bounds(config, head_dim)
    dimensions = torch.arange(head_dim // 2, dtype=torch.float32)
    interpolated = ((dimensions - first) / (last - first)).clamp(0, 1)
    frequency = _default(config, head_dim)
    return interpolated * frequency / config.factor + (1 - interpolated) * frequency


def _yarn_bounds(config: RopeConfig, head_dim: int) -> tuple[float, float]:
    """Where the ramp begins and ends: the dimensions that turn `beta_fast` and `beta_slow` times."""

    def dimension(num_turns: float) -> float:
        wavelength = config.original_max_positions / num_turns
        return head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(config.theta))

    first, last = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    return first, last if last != first else last + 0.001  # a step instead of a division by zero


INVERSE_FREQUENCIES: dict[str, Callable[[RopeConfig, int], Tensor]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "divisors": _divisors,
}
