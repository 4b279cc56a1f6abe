"""The table of the resolve bench."""

from hisparse.bench.resolve_table import heading, line
from tests.bench.results import RESULT


def test_a_line_stands_under_its_headings() -> None:
    about, names = heading(RESULT).splitlines()
    assert about == (
        "NVIDIA H200, commit 4c12575: trace high, k 2048, B 4096, 1152 B records, 16 layers, 54 steps, lru"
    )
    cells = line(RESULT)
    assert len(cells) == len(names)
    assert names.split("  ")[-1] == "rebuild %"
    assert " ".join(cells.split()) == "16 105.7 104.0 / 108.3 / 112.9 10.2 4321 13.19 47.1 55.5 1.18 7.3"


def test_exact_misses_have_columns_of_their_own() -> None:
    result = {**RESULT, "misses_exact_lru": 4318.2, "miss_ratio": 1.00074}
    assert heading(result).endswith("exact misses  x exact")
    assert line(result).split()[-2:] == ["4318", "1.00074"]
    assert len(line(result)) == len(heading(result).splitlines()[1])


def test_nothing_fetched_and_nothing_to_compare() -> None:
    result = {**RESULT, "commit": None, "ratio_to_copy": None, "misses_exact_lru": 0.0, "miss_ratio": None}
    assert "commit unknown" in heading(result)
    assert line(result).split()[-4:] == ["-", "7.3", "0", "-"]
