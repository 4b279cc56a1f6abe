"""Checkpoints loaded as the kind of model that a test is about."""

from pathlib import Path
from typing import Any

from hisparse.checkpoint import load
from hisparse.models import Llama, SparseMla


def load_llama(folder: Path | str, **options: Any) -> Llama:
    model = load(folder, **options).model
    assert isinstance(model, Llama)
    return model


def load_sparse_mla(folder: Path | str, **options: Any) -> SparseMla:
    model = load(folder, **options).model
    assert isinstance(model, SparseMla)
    return model
