"""Models, in plain torch, whose attention is the caller's: `attend.py` and `attend_latent.py` are the contracts."""

from hisparse.models.attend import Attend
from hisparse.models.attend_latent import IndexInputs, LatentAttention
from hisparse.models.llama import Llama
from hisparse.models.llama_config import LlamaConfig
from hisparse.models.sparse_mla import SparseMla
from hisparse.models.sparse_mla_config import SparseMlaConfig

Model = Llama | SparseMla

__all__ = ["Attend", "IndexInputs", "LatentAttention", "Llama", "LlamaConfig", "Model", "SparseMla", "SparseMlaConfig"]
