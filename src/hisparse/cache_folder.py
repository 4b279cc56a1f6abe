"""Where things are kept between runs: the demo model, converted tokenizers, compiled kernels.

The one place that reads the environment variable HISPARSE_CACHE.
"""

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$HISPARSE_CACHE`, else `~/.cache/hisparse`; it need not exist yet."""
    chosen = os.environ.get("HISPARSE_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "hisparse"
