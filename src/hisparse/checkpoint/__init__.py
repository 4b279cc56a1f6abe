"""Checkpoints: folders, GGUF files, the hub cache, the demo model; `load` is the door."""

from hisparse.checkpoint.loaded import Loaded, load

__all__ = ["Loaded", "load"]
