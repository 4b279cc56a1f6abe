"""Checkpoint tests keep what they keep in a folder of their own."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_cache_folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Away from the user's cache folder, except for slow tests, which use the demo model that is kept there."""
    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setenv("HISPARSE_CACHE", str(tmp_path / "cache"))
