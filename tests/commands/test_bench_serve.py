"""`hisparse bench serve` as a user meets it, against this package's own server."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hisparse.checkpoint import load
from hisparse.checkpoint.tiny import write_tiny
from hisparse.commands.main import main
from tests.server.serving import CONTEXT, Served, SlowEngine, assert_nothing_left, wait_until

SMALL = ("--input-tokens", "20", "--output-tokens", "8", "--requests", "6")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(load(write_tiny(tmp_path_factory.mktemp("tiny"), max_positions=CONTEXT)), api_key="key")
    yield served
    assert_nothing_left(served.loop)
    served.stop()


def arguments(served: Served, *more: str) -> list[str]:
    return ["bench", "serve", "--base-url", served.url, "--api-key", "key", *SMALL, *more]


def test_a_table(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    main_that_exits(0, arguments(served, "--concurrency", "2"))
    out = capsys.readouterr().out
    assert f"tiny at {served.url}/v1, completions" in out
    assert "6 sent" in out
    assert "random token ids, 20 tokens (20 by the server's count)" in out
    assert "time to first token" in out


def test_one_json_line_of_a_chat(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    main_that_exits(0, arguments(served, "--request-rate", "200", "--chat", "--json"))
    [line] = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    assert (result["completed"], result["request_rate"], result["api"]) == (6, 200.0, "chat/completions")
    assert result["ttft_ms"]["p99"] > 0


def test_ctrl_c_gives_what_was_measured(served: Served) -> None:
    slow = SlowEngine(served.loop.engine, seconds=0.01)
    listening = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "  # also in the background
    command = listening + "from hisparse.commands.main import main; main()"
    more = ("--json", "--requests", "1000", "--concurrency", "2", "--output-tokens", "20")
    with subprocess.Popen(
        [sys.executable, "-c", command, *arguments(served, *more)], stdout=subprocess.PIPE, text=True
    ) as process:
        wait_until(lambda: served.loop.num_unfinished == 2, "the load")
        before = finished(served)
        wait_until(lambda: finished(served) > before + 5, "some answers")
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    served.loop.engine.step = slow._step  # type: ignore[method-assign]
    result = json.loads(out)
    assert process.returncode == 130
    assert result["interrupted"] is True
    assert 0 < result["completed"] < 1000
    assert result["unfinished"] > 0
    assert result["sent"] == result["completed"] + result["failed"] + result["unfinished"]


def finished(served: Served) -> float:
    lines = served.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("hisparse_requests_total"))


def main_that_exits(code: int, given: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(given)
    assert left.value.code == code


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--concurrency", "1", "--request-rate", "1"), "are different loads: give one"),
        (("--prompts", "none.txt"), "give one of them"),
        (("--extra", "{"), "--extra is not JSON"),
        (("--extra", "[]"), "--extra must be a JSON object"),
        (("--extra", '{"n": 3}'), "--extra cannot set 'n': a request is one answer"),
        (("--extra", '{"stream": null}'), "--extra cannot set 'stream': every answer is timed as it streams"),
        (("--api-key", "wrong"), "give --api-key"),
        (("--model", "other"), "the model 'other' is not here"),
        (("--input-tokens", "600"), "600 tokens, this server's context is 512"),
        (("--base-url", "http://127.0.0.1:9"), "nothing answers at http://127.0.0.1:9/v1/"),
    ],
)
def test_what_cannot_be_is_told(
    served: Served, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], message: str
) -> None:
    main_that_exits(2, arguments(served, *more))
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error


def test_nothing_completed(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    main_that_exits(2, arguments(served, "--input-tokens", "600", "--warm-up", "0"))
    out, err = capsys.readouterr()
    assert "6  HTTP 400" in out
    assert "none of 6 requests completed" in err


def test_help(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main_that_exits(0, ["bench", "serve", "--help"])
    assert "Usage" in capsys.readouterr().out
