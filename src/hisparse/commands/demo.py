"""`hisparse demo`: a real model, a long document, a bounded device pool, and proof of equality."""

from importlib import resources

import typer

from hisparse.commands.options import JsonOption, print_json
from hisparse.commands.progress import console
from hisparse.commands.session import load_model, prepare, print_statistics
from hisparse.commands.verify import build_verification, describe, print_verdict
from hisparse.config import HiSparseConfig
from hisparse.needle import NEEDLE, PASSWORD, QUESTION, ask, hide

# Chosen by the sweep in LOG.md, where dense attention's own success stands beside it.
DEPTH = 0.5
CONFIG = {"top_k": 512, "device_buffer_size": 1024, "max_running_requests": 1}
MAX_TOKENS = 32


def demo(as_json: JsonOption = False) -> None:
    """Ask SmolLM2 about a sentence hidden in a long text, with a quarter of the KV memory, and prove it exact.

    Takes a few minutes on a laptop: the text is read three times, hierarchically, fully resident, and with
    dense attention for comparison.
    """
    from hisparse.engine import SamplingParams

    config = HiSparseConfig.from_mapping(CONFIG)
    loaded = load_model("smollm2", "float32", "cpu")
    prompt = ask(loaded.tokenizer, hide(loaded.tokenizer, read_document(), DEPTH))
    console.print(f"A text of {len(prompt):,} tokens, with this sentence hidden at {DEPTH:.0%} of it:\n  {NEEDLE}")
    verification = build_verification(loaded, config, len(prompt) + MAX_TOKENS)
    session = prepare(loaded, config, [prompt], SamplingParams(max_tokens=MAX_TOKENS), [verification])
    session.run()
    answer, summary = session.requests[0].text.strip(), session.meter.summary()
    found = PASSWORD in answer
    if as_json:
        result = {"answer": answer, "found": found, "equal": verification.equal, "steps": verification.steps}
        print_json(result | describe(verification) | summary)
    else:
        print(f"question: {QUESTION}\nanswer:   {answer}")
        print_verdict(verification)
        print_statistics(summary)
    if not (found and verification.equal):
        raise typer.Exit(1)


def read_document() -> str:
    """The text that ships with the package."""
    return resources.files("hisparse").joinpath("demo_document.txt").read_text(encoding="utf-8")
