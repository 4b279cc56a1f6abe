"""Loads a checkpoint's tokenizer, quietly, and gathers the tokens at which generation stops.

`loaded.py` calls it. Tokenizers are transformers' own, so that chat templates behave as users know them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hisparse.checkpoint.folder import read_json
from hisparse.checkpoint.gguf_file import GgufFile
from hisparse.checkpoint.gguf_tokenizer import gguf_tokenizer
from hisparse.errors import CheckpointError
from hisparse.models.config_values import token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION_FILE = "generation_config.json"


def load_tokenizer(source: Path | GgufFile) -> "PreTrainedTokenizerBase":
    """The tokenizer of a checkpoint folder or of a GGUF file."""
    path = source.path if isinstance(source, GgufFile) else source
    with _quiet_transformers():
        try:
            return gguf_tokenizer(source) if isinstance(source, GgufFile) else _folder_tokenizer(source)
        except Exception as error:  # transformers and tokenizers raise bare Exception for damaged files
            raise CheckpointError(
                f"{path}: the tokenizer cannot be loaded: {type(error).__name__}: {error}; "
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
