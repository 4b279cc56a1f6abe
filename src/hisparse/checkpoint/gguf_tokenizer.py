"""Builds a tokenizer from the vocabulary in a GGUF file.

`tokenizer.py` calls it. Byte-level vocabularies whose way of splitting text is known here (SmolLM2, Llama 3,
Qwen) are built directly, which takes a second; transformers converts any other, more slowly.
"""

from typing import TYPE_CHECKING, Any

from hisparse.checkpoint.gguf_file import GgufFile

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTROL, USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
# Words, digits in runs of a model's own length, punctuation, white space: Llama 3's expression, and Qwen 2's.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLIT_LLAMA3, SPLIT_QWEN2 = SPLIT % "{1,3}", SPLIT % ""


def gguf_tokenizer(file: GgufFile) -> "PreTrainedTokenizerBase":
    """The file's tokenizer, with its chat template and special tokens."""
    from transformers import PreTrainedTokenizerFast

    splitter = _splitter(file.metadata.get("tokenizer.ggml.pre"))
    if file.metadata.get("tokenizer.ggml.model") != "gpt2" or splitter is None:
        return _converted(file)
    return PreTrainedTokenizerFast(
        tokenizer_object=_byte_level(file, splitter),
        chat_template=file.metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **_special_tokens(file),
    )


def _converted(file: GgufFile) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(file.path.parent, gguf_file=file.path.name)


def _splitter(pre: str | None) -> Any:
    """The pre-tokenizer that `tokenizer.ggml.pre` names, or None where it is not known here."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    if pre == "smollm":
        return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    expression = {"llama-bpe": SPLIT_LLAMA3, "qwen2": SPLIT_QWEN2}.get(pre or "")
    if expression is None:
        return None
    whole = ByteLevel(add_prefix_space=False, use_regex=False)
    return Sequence([Split(Regex(expression), behavior="isolated"), whole])


def _byte_level(file: GgufFile, splitter: Any) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    tokens, merges = file.metadata["tokenizer.ggml.tokens"], file.metadata["tokenizer.ggml.merges"]
    pre = file.metadata["tokenizer.ggml.pre"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ", 1)) for merge in merges],
            ignore_merges=pre == "llama-bpe",
        )
    )
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    kinds = file.metadata.get("tokenizer.ggml.token_type", [])
    for token, kind in zip(tokens, kinds, strict=False):
        if kind in (CONTROL, USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, special=kind == CONTROL, normalized=False)])
    _begin_with_bos(tokenizer, file)
    return tokenizer


def _begin_with_bos(tokenizer: Any, file: GgufFile) -> None:
    from tokenizers.processors import TemplateProcessing

    bos = file.metadata.get("tokenizer.ggml.bos_token_id")
    # Llama 3 files leave the key out and mean it.
    wanted = file.metadata.get("tokenizer.ggml.add_bos_token", file.metadata["tokenizer.ggml.pre"] == "llama-bpe")
    if wanted and bos is not None:
        token = file.metadata["tokenizer.ggml.tokens"][bos]
        tokenizer.post_processor = TemplateProcessing(
            single=f"{token} $A", pair=f"{token} $A $B", special_tokens=[(token, bos)]
        )


def _special_tokens(file: GgufFile) -> dict[str, str]:
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: file.metadata.get(f"tokenizer.ggml.{own}_token_id") for name, own in keys.items()}
    tokens = file.metadata["tokenizer.ggml.tokens"]
    return {name: tokens[index] for name, index in ids.items() if index is not None}
