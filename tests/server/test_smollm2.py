"""`hisparse serve smollm2` answers the demo's question: a pretrained model behind the real server, a shorter text."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator

import httpx
import openai
import pytest

from hisparse.checkpoint import load
from hisparse.commands.demo import CONFIG, DEPTH, MAX_TOKENS, read_document
from hisparse.needle import PASSWORD, QUESTION, hide
from tests.server.serving import PATIENCE_S, wait_until

TEXT_TOKENS = 1100  # more than the device buffer, so that records are selected, left out and fetched again
MAX_CONTEXT = 1300


@pytest.fixture
def url() -> Iterator[str]:
    """Of a server in the configuration of the demo."""
    command = "from hisparse.commands.main import main; main()"
    arguments = ["serve", "smollm2", "--port", "0", "--max-context", str(MAX_CONTEXT)]
    arguments += ["--hisparse-config", json.dumps(CONFIG)]
    with subprocess.Popen([sys.executable, "-c", command, *arguments], stderr=subprocess.PIPE, text=True) as process:
        yield _address(process)
        process.kill()


def _address(process: subprocess.Popen[str]) -> str:
    said = []
    for line in process.stderr or ():
        said.append(line)
        if found := re.search(r"serving smollm2 at (http://[\d.:]+)", line):
            return found[1]
    raise AssertionError(f"it ended without saying where it listens: {''.join(said)}")


def _fetched(url: str) -> int:
    metrics = httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text
    return sum(int(float(value)) for value in re.findall(r"^hisparse_misses_total\{.*\} (.+)$", metrics, re.MULTILINE))


@pytest.mark.slow
def test_it_answers_the_question_of_the_demo(url: str) -> None:
    text = hide(load("smollm2").tokenizer, read_document(), DEPTH, TEXT_TOKENS)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        chunks = list(
            client.chat.completions.create(
                model="smollm2",
                messages=[{"role": "user", "content": f"{text}\n\n{QUESTION}"}],
                temperature=0,
                max_completion_tokens=MAX_TOKENS,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    pieces = [choice.delta.content for chunk in chunks for choice in chunk.choices if choice.delta.content]
    assert PASSWORD in "".join(pieces)
    assert len(pieces) > 1
    usage = chunks[-1].usage
    assert usage is not None
    assert CONFIG["device_buffer_size"] < usage.prompt_tokens < MAX_CONTEXT - MAX_TOKENS
    wait_until(lambda: _fetched(url) > 0, "a fetch")
