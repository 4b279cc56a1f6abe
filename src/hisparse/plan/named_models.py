"""Published models whose configuration comes with the package, so that they can be planned without a download.

The files in configs/ hold what decides sizes, as published: shapes, which layers have an indexer, the weights'
quantisation. `like` names another of them for everything that a file does not say.
"""

import json
from importlib.resources import files
from typing import Any

NAMED_MODELS = ("deepseek-v3.2", "glm-5.1", "glm-5.2")


def named_config(name: str) -> dict[str, Any]:
    """A config.json dictionary of one of `NAMED_MODELS`."""
    config: dict[str, Any] = json.loads((files("hisparse.plan") / "configs" / f"{name}.json").read_text("utf-8"))
    base = config.pop("like", None)
    return named_config(base) | config if base else config
