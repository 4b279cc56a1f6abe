"""Loads a checkpoint's tokenizer, quietly, and gathers the tokens at which generation stops.

`loaded.py` calls it. Tokenizers are transformers' own, so that chat templates behave as users know them. Its
conversion of a GGUF file's vocabulary takes seconds, so the result is kept in the cache folder.
"""

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hisparse.cache_folder import cache_folder
from hisparse.checkpoint.folder import read_json
from hisparse.checkpoint.gguf_file import GgufFile
from hisparse.errors import CheckpointError
from hisparse.models.config_values import token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION_FILE = "generation_config.json"


def load_tokenizer(source: Path | GgufFile) -> "PreTrainedTokenizerBase":
    """The tokenizer of a checkpoint folder or of a GGUF file. Raises `CheckpointError` if it is damaged."""
    path = source.path if isinstance(source, GgufFile) else source
    with _quiet_transformers():
        try:
            return _gguf_tokenizer(source) if isinstance(source, GgufFile) else _folder_tokenizer(source)
        except CheckpointError:  # a kept copy is damaged: the message says so already
            raise
        except Exception as error:  # transformers and tokenizers raise bare Exception for damaged files
            raise CheckpointError(
                f"{path}: the tokenizer cannot be loaded: {type(error).__name__}: {' '.join(str(error).split())}; "
                "a checkpoint needs tokenizer.json or the files of an older tokenizer beside its weights"
            ) from error


def stop_token_ids(
    source: Path | GgufFile, config_eos: tuple[int, ...], tokenizer: "PreTrainedTokenizerBase"
) -> tuple[int, ...]:
    """Every token that ends an answer, ascending: config.json's, generation_config.json's, the tokenizer's."""
    stops = set(config_eos)
    if isinstance(source, Path) and (source / GENERATION_FILE).is_file():
        stops.update(token_ids(read_json(source / GENERATION_FILE), "eos_token_id"))
    if tokenizer.eos_token_id is not None:
        stops.add(int(tokenizer.eos_token_id))
    return tuple(sorted(stops))


def _folder_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _gguf_tokenizer(file: GgufFile) -> "PreTrainedTokenizerBase":
    """The file's tokenizer as transformers converts it: once, and from then on from the cache folder."""
    from transformers import AutoTokenizer

    kept = _kept_at(file)
    if os.path.isdir(kept):  # unlike Path.is_dir, False also where the folder may not be looked into
        try:
            return _folder_tokenizer(kept)
        except Exception as error:
            raise CheckpointError(f"the copy kept in {kept} is damaged ({error}): delete that folder") from error
    tokenizer = AutoTokenizer.from_pretrained(file.path.parent, gguf_file=file.path.name)
    # A folder that cannot be written, a full disk (for tokenizers a bare Exception), or another process was
    # first: the next load is slower, nothing else.
    with suppress(Exception):
        _keep(tokenizer, kept)
    return tokenizer


def _kept_at(file: GgufFile) -> Path:
    """A folder for each vocabulary and each transformers, which may convert the same vocabulary differently."""
    from transformers import __version__

    digest = hashlib.sha256(file.header + __version__.encode()).hexdigest()
    return cache_folder() / "tokenizers" / f"{file.path.stem}-{digest[:16]}"


def _keep(tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    """Save under another name, then rename: whoever finds the folder finds it complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="convert-", dir=folder.parent) as scratch:
        complete = Path(scratch) / folder.name
        tokenizer.save_pretrained(complete)
        complete.rename(folder)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No warnings and no progress bars from transformers while a tokenizer loads; then as before."""
    from transformers.utils import logging

    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()
