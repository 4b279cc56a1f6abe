"""Models, in plain torch, whose attention is the caller's: see `attend.py` for the contract."""

from hisparse.models.attend import Attend
from hisparse.models.llama import Llama
from hisparse.models.llama_config import LlamaConfig

__all__ = ["Attend", "Llama", "LlamaConfig"]
