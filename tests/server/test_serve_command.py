"""`hisparse serve` as a process of its own: it answers, drains at SIGTERM, and leaves with 0."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from hisparse.commands.main import main
from hisparse.commands.session import load_model
from hisparse.server.serving import bind

SMALL = ("--top-k", "32", "--device-buffer-size", "48")


@pytest.fixture
def process(tiny_folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = "from hisparse.commands.main import main; main()"
    arguments = [
        "serve",
        str(tiny_folder),
        "--port",
        "0",
        "--served-model-name",
        "tiny",
        "--max-context",
        "400",
        *SMALL,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", command, *arguments], stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        yield process
        process.kill()


def url_of(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"serving tiny at (http://127\.0\.0\.1:\d+)", line):
            return found[1]
    raise AssertionError("it ended without saying where it listens")


def test_it_answers_and_drains(process: subprocess.Popen[str]) -> None:
    url = url_of(process)
    body = {"prompt": "hello", "max_tokens": 300, "temperature": 0, "stream": True}
    with ThreadPoolExecutor(1) as threads:
        begun = httpx.post(f"{url}/v1/completions", json=body | {"max_tokens": 3}, timeout=60)
        assert begun.status_code == 200
        answer = threads.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=60)
        while "hisparse_unfinished 1.0" not in httpx.get(f"{url}/metrics", timeout=60).text and not answer.done():
            pass
        process.send_signal(signal.SIGTERM)
        assert answer.result().text.endswith("data: [DONE]\n\n")
        assert '"error"' not in answer.result().text
    assert process.wait(timeout=60) == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--port", "70000"), "--port"),
        (("--max-waiting", "0"), "--max-waiting"),
        (("--max-context", "1"), "--max-context"),
        (("--drain-seconds", "-1"), "--drain-seconds"),
        (("--api-key", " "), "--api-key"),
        (("--max-running-requests", "0"), "max_running_requests"),
        (("--top-k", "64", "--device-buffer-size", "64"), "device_buffer_size"),
    ],
)
def test_bad_options_get_a_message_and_2(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], words: str
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["serve", str(tiny_folder), *options])
    assert left.value.code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("error: ")
    assert words in message


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_an_address_that_is_taken_is_an_error(tiny_folder: Path, capsys: pytest.CaptureFixture[str], host: str) -> None:
    try:
        taken = bind(host, 0)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    taken.listen()
    with pytest.raises(SystemExit) as left:
        main(["serve", str(tiny_folder), "--host", host, "--port", str(taken.getsockname()[1])])
    taken.close()
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith("error: cannot listen at")


def test_an_address_that_is_taken_while_the_model_loads(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = bind("127.0.0.1", 0)

    def load_slowly(*arguments: Any) -> Any:
        taken.listen()
        return load_model(*arguments)

    monkeypatch.setattr("hisparse.commands.serve.load_model", load_slowly)
    with pytest.raises(SystemExit) as left:
        main(["serve", str(tiny_folder), "--port", str(taken.getsockname()[1]), "--max-context", "400", *SMALL])
    taken.close()
    assert left.value.code == 2
    assert "error: cannot listen at" in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["serve", "--help"])
    assert left.value.code == 0
    assert "Usage" in capsys.readouterr().out
