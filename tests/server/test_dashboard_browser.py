"""The dashboard in a real browser, where there is one: it draws, says what is wrong, and its console stays empty."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hisparse.checkpoint import Loaded
from hisparse.server.dashboard import pages
from tests.server.serving import MODEL, Served

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
LONGEST_S = 120
NUM_POLLS = 4

pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"no browser: none of {', '.join(NAMES)}")


def look(url: str, folder: Path) -> tuple[str, list[str]]:
    """The page after a few polls, and what its console says."""
    assert BROWSER is not None
    options = (
        "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--user-data-dir={folder}",
        f"--virtual-time-budget={1000 * NUM_POLLS}", "--dump-dom",
    )  # fmt: skip
    done = subprocess.run([BROWSER, *options, url], capture_output=True, text=True, timeout=LONGEST_S, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def words(page: str, element_id: str) -> str:
    """The text of an element that holds nothing else."""
    found = re.search(rf'id="{element_id}"[^>]*>([^<]*)<', page)
    assert found is not None, element_id
    return found[1]


def test_it_shows_a_server_that_has_worked(loaded: Loaded, tmp_path: Path) -> None:
    served = Served(loaded, api_key="key")
    key = {"Authorization": "Bearer key"}
    body = {"model": MODEL, "prompt": "x" * 200, "temperature": 0, "max_tokens": 40}
    assert served.post("/v1/completions", body, headers=key).status_code == 200
    page, console = look(served.url.replace("://", "://me:key@") + "/dashboard", tmp_path)
    served.stop()
    assert console == []
    assert (words(page, "status"), words(page, "model"), words(page, "running")) == ("idle", MODEL, "0")
    assert words(page, "throughput-aside").startswith("40 tokens since the start")
    assert words(page, "requests-aside") == "ended: 1 length"
    assert float(words(page, "ttft")) > 0
    assert words(page, "tpot-aside").endswith("of 1 answer")
    assert re.search(r"mean \d+\.\d %, lowest \d+\.\d % \(layer \d\), since the start", words(page, "heat-aside"))
    assert len(re.findall(r'class="cell" title="layer \d: \d+\.\d %" style="background-color', page)) == 2
    assert page.count('class="pool"') == 4
    assert page.count('class="line first"') >= 4  # a curve in every chart
    assert 'id="banner" role="alert" hidden' in page


def test_many_layers_and_no_requests(served: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    read = pages.State.read

    def many(state: pages.State) -> dict[str, Any]:
        return read(state) | {"hits": [9] * 80, "misses": list(range(80))}

    monkeypatch.setattr(pages.State, "read", many)
    page, console = look(f"{served.url}/dashboard", tmp_path)
    assert console == []
    assert page.count('class="cell"') == 80
    assert 'title="layer 0: 100.0 %"' in page
    assert [int(layer) for layer in re.findall(r"<b[^>]*>(\d+)</b>", page)] == list(range(0, 80, 5))
    assert words(page, "ttft") == "\u2013"


def test_it_says_that_the_server_is_ending(served: Served, tmp_path: Path) -> None:
    served.loop.begin_stop(timeout_s=0)
    page, _ = look(f"{served.url}/dashboard", tmp_path)
    assert words(page, "status") == "unavailable"
    assert "The server is shutting down" in words(page, "banner")


def test_it_says_that_the_server_does_not_answer_and_recovers(
    served: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    read, asked = pages.State.read, 0

    def fail(state: pages.State) -> dict[str, Any]:
        nonlocal asked
        asked += 1
        if asked >= fail_from and asked < fail_to:
            raise RuntimeError("as a test wants")
        return read(state)

    monkeypatch.setattr(pages.State, "read", fail)
    fail_from, fail_to = 2, 1000
    page, _ = look(f"{served.url}/dashboard", tmp_path / "away")
    assert words(page, "status") == "not answering"
    assert "status 500" in words(page, "banner")
    assert '<main id="main" class="stale"' in page
    asked, fail_from, fail_to = 0, 1, 2
    page, _ = look(f"{served.url}/dashboard", tmp_path / "back")
    assert (words(page, "status"), words(page, "banner")) == ("idle", "")
    assert "stale" not in page
