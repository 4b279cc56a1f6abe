"""The demo as it ships: a pretrained model, a real text, a quarter of the memory, the same output."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_demo_finds_the_needle_with_a_quarter_of_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    from hisparse.commands.main import main
    from hisparse.needle import PASSWORD

    with pytest.raises(SystemExit) as left:
        main(["demo", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert left.value.code in (0, None)
    assert result["equal"]
    assert PASSWORD in result["answer"]
    assert result["prompt_tokens"] >= 6000
    assert result["device_kv_bytes"] * 4 <= result["full_kv_bytes"]
    assert result["fetched_bytes"] > 0


def test_example_loop_runs() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "drive_the_cache.py"], capture_output=True, text=True, check=True
    )
    assert "hits=" in done.stdout
