"""The real demo model against transformers reading the same GGUF file."""

import pytest
import torch

from hisparse.checkpoint import load
from hisparse.models import Llama
from tests.models.test_llama import dense_logits

TEXT = (
    "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my purse, "
    "and nothing particular to interest me on shore, I thought I would sail about a little and see the watery "
    "part of the world. In 1851 it was 14,5 dollars; naïve? def f(x): return x + 42\n\n  It's a way I've of "
    "driving off the spleen and regulating the circulation."
)
NUM_TOKENS = 64


@pytest.mark.slow
def test_logits_and_tokens_equal_transformers() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = load("smollm2")
    folder, file = loaded.path.parent, loaded.path.name
    their_tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    ids = loaded.tokenizer(TEXT)["input_ids"]
    assert ids == their_tokenizer(TEXT)["input_ids"]
    messages = [{"role": "user", "content": "What is 12 + 30?"}]
    rendered = [
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        for tokenizer in (loaded.tokenizer, their_tokenizer)
    ]
    assert rendered[0] == rendered[1]
    assert "<|im_start|>user\nWhat is 12 + 30?<|im_end|>" in rendered[0]
    assert loaded.stop_token_ids == (loaded.tokenizer.convert_tokens_to_ids("<|im_end|>"),) == (2,)

    tokens = torch.tensor(ids[:NUM_TOKENS])
    assert len(tokens) == NUM_TOKENS
    assert isinstance(loaded.model, Llama)
    ours = dense_logits(loaded.model, tokens, [NUM_TOKENS])
    oracle = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    with torch.no_grad():
        theirs = oracle(tokens[None]).logits[0]
    error = float((ours - theirs).abs().max() / theirs.abs().max())
    print(f"largest difference over largest logit: {error:.2e}")
    assert error < 1e-4
