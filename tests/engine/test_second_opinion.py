"""The whole engine with the selector `all` against transformers on the same checkpoint, in float32."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hisparse.checkpoint import Loaded, load
from hisparse.config import HiSparseConfig
from hisparse.engine import Request, SamplingParams
from tests.engine.engines import Checkpoints, Record, assert_clean, garbage_engine, prompt_of
from tests.models.test_llama import LLAMA, LLAMA3, QWEN2, QWEN3, YARN

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "llama": {"architecture": LLAMA},
    "llama one kv head, tied": {"architecture": LLAMA, "num_kv_heads": 1, "tied": True},
    "llama llama3": {"architecture": LLAMA, "rope": LLAMA3, "head_dim": 32},
    "qwen2": {"architecture": QWEN2, "tied": True},
    "qwen2 yarn": {"architecture": QWEN2, "rope": YARN, "num_heads": 6},
    "qwen3": {"architecture": QWEN3},
    "qwen3 biased": {"architecture": QWEN3, "attention_bias": True, "num_kv_heads": 4},
}
LENGTHS = (170, 1, 64, 99)  # several chunks, one token, whole pages, the middle of a page
NUM_DECODES = 20


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_and_tokens_equal_transformers(name: str, checkpoints: Checkpoints) -> None:
    tiny = checkpoints.get(**CHECKPOINTS[name])
    prompts = [prompt_of(length) for length in LENGTHS]
    oracle = their_model(tiny.folder)
    for request, logits in run_greedily(tiny.loaded, prompts, NUM_DECODES):
        torch.testing.assert_close(logits, their_logits(oracle, request), atol=1e-4, rtol=1e-4)
        assert request.output == their_tokens(oracle, request.prompt, NUM_DECODES)


@pytest.mark.slow
def test_smollm2_equals_transformers() -> None:
    loaded = load("smollm2")
    prompt = loaded.tokenizer(PROSE)["input_ids"]
    assert 280 <= len(prompt) <= 340
    oracle = their_model(loaded.path.parent, gguf_file=loaded.path.name)
    [(request, logits)] = run_greedily(replace(loaded, stop_token_ids=()), [prompt], num_decodes=8)
    theirs = their_logits(oracle, request)
    error = float((logits - theirs).abs().max() / theirs.abs().max())
    print(f"largest difference over largest logit: {error:.2e}")
    assert error < 1e-4
    assert request.output == their_tokens(oracle, prompt, num_decodes=8)


def run_greedily(loaded: Loaded, prompts: list[list[int]], num_decodes: int) -> Iterator[tuple[Request, Tensor]]:
    """Each request of one batch, ended, with its logits [1 + num_decodes, vocab]: after the prompt, then each step."""
    top_k = max(map(len, prompts)) + num_decodes + 1
    config = HiSparseConfig(
        top_k=top_k, device_buffer_size=top_k + 1, selector="all", prefill_chunk=100, max_num_batched_tokens=1000
    )
    record = Record()
    engine = garbage_engine(loaded, config, [top_k] * len(prompts), [record])
    requests = [engine.submit(prompt, SamplingParams(max_tokens=num_decodes + 1)) for prompt in prompts]
    engine.run()
    assert_clean(engine)
    assert len(record.decodes) == num_decodes  # all of them together at every step
    for request in requests:
        yield request, torch.stack(record.logits[request.id])


def their_model(folder: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True, **options
    )


@torch.no_grad()
def their_logits(oracle: Any, request: Request) -> Tensor:
    """[output, vocab]: what stood before each token of the output."""
    tokens = torch.tensor([request.prompt + request.output[:-1]])
    logits: Tensor = oracle(tokens).logits[0, len(request.prompt) - 1 :]
    return logits


@torch.no_grad()
def their_tokens(oracle: Any, prompt: list[int], num_decodes: int) -> list[int]:
    """What transformers generates by itself, greedily, and stopped by no token."""
    tokens = torch.tensor([prompt])
    count = num_decodes + 1
    oracle.generation_config.eos_token_id = None
    out = oracle.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=False,
        max_new_tokens=count,
        eos_token_id=None,
        pad_token_id=0,
    )
    generated: list[int] = out[0, len(prompt) :].tolist()
    assert len(generated) == count
    return generated


PROSE = """\
The harbour had two walls, and the older one leaned. Nobody remembered who had built it, though the priest kept a \
ledger in which a mason named Aubin was paid eleven crowns for "stones, and the carrying of them, and beer". In \
winter the sea came over it in sheets; in summer children sat along its top with their feet hanging over the water \
and dropped crumbs for the mullet. Every spring the council met to decide whether it should be pulled down, and every \
spring the council decided that it should be decided next year.

The lighthouse keeper's daughter, Marthe, had a theory about the wall. She held that it leaned because it was \
listening. "Put your ear there," she told the new schoolmaster, on the first day he came down to the quay in his thin \
shoes, and she showed him a hollow between two blocks, worn smooth. He put his ear to it, because she was watching, \
and because he had nothing else to do until Monday. He heard the sea, as one would expect. He heard a cart go by on \
the upper road. And then, quite clearly, he heard somebody a long way off counting slowly: thirty-one, thirty-two, \
thirty-three.

He stood up and brushed the salt from his sleeve. There were explanations, he said. A drain, perhaps, that ran up \
into the town and carried voices. Marthe agreed that there were always explanations. She asked what number it had \
reached, and when he told her she wrote it with a nail on the soft slate beside the hollow
"""
