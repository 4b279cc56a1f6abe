"""docs/architecture.md tells the truth: its map has every file and folder, and imports point only upward in it."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "hisparse"


def lines_of_map() -> dict[str, int]:
    """The map's line of each file or folder, by its name without an ending."""
    text = (ROOT / "docs" / "architecture.md").read_text().split("## The map")[1]
    lines = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {name: number for number, line in enumerate(lines) for name in re.findall(r"`(\w+)(?:\.py|/)`", line)}


def imported_by(path: Path) -> set[str]:
    """Files and folders of the package that a module needs when it is imported."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if "." in node.module else [f"{node.module}.{alias.name}" for alias in node.names]
            found.update(name.split(".")[1] for name in names if name.startswith("hisparse."))
    return found


def test_the_map_is_whole_and_imports_point_upward() -> None:
    line = lines_of_map()
    modules = [path for path in SOURCE.rglob("*.py") if path.parent != SOURCE or not path.stem.startswith("__")]
    place = {path: path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in modules}
    assert set(place.values()) == set(line) - {"dashboard"}  # a folder of server
    downward = {
        f"{path.relative_to(SOURCE)} imports {name}"
        for path in modules
        for name in imported_by(path) & set(line)
        if line[name] > line[place[path]]
    }
    assert not downward
