"""Sizes as people write them: 141GB and 2TB of memory, 128K tokens. Read here, and written back for messages.

Memory follows the labels of its makers: GB is 10**9 bytes and GiB 2**30. Contexts follow those of models: 128K is
131,072 tokens.
"""

import math
import re
from collections.abc import Mapping

DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
BINARY = {f"{letter}I": 2 ** (10 * power) for power, letter in enumerate("KMGT", start=1)}
BYTE_UNITS = {f"{prefix}B": factor for prefix, factor in (DECIMAL | BINARY).items()}
TOKEN_UNITS = {"": 1, "K": 2**10, "M": 2**20}
BYTES_ACCEPTED = "a size in B, kB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (powers of 1024), such as 141GB"
TOKENS_ACCEPTED = "a number of tokens, alone or with K (1,024) or M (1,048,576), such as 131072 or 128K"


def parse_bytes(name: str, text: str) -> int:
    """Bytes of a size such as `141GB`. Raises `ValueError` that names the option and says what is accepted."""
    return _parse(name, text, BYTE_UNITS, BYTES_ACCEPTED)


def parse_tokens(name: str, text: str) -> int:
    """Tokens of a context such as `128K`. Raises `ValueError` that names the option and says what is accepted."""
    return _parse(name, text, TOKEN_UNITS, TOKENS_ACCEPTED)


def _parse(name: str, text: str, units: Mapping[str, int], accepted: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text, re.ASCII)
    factor = units.get(match.group(2).upper()) if match else None
    amount = float(match.group(1)) * factor if match and factor else 0.0
    if not 1 <= amount < math.inf:
        raise ValueError(f"{name} must be {accepted}, and above 0; got {text!r}")
    return int(amount)


def in_words(num_bytes: float) -> str:
    """Bytes as people write them, with three figures: `13.1 GB`."""
    unit = max((unit for unit in DECIMAL if DECIMAL[unit] <= max(num_bytes, 1)), key=lambda unit: DECIMAL[unit])
    value = num_bytes / DECIMAL[unit]
    digits = 0 if not unit or value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {'k' if unit == 'K' else unit}B"


def at_least(num_bytes: int) -> str:
    """The next larger size that an option takes, with five figures or so: `104.73GB`."""
    unit = "GB" if num_bytes >= 10**9 else "MB"
    hundredths = BYTE_UNITS[unit] // 100
    return f"{-(-num_bytes // hundredths) / 100:g}{unit}"
