"""`hisparse trace` as a user meets it."""

import json
from pathlib import Path

import pytest

from hisparse.checkpoint.tiny import write_tiny
from hisparse.commands.main import main
from hisparse.trace import open_trace
from tests.trace.traces import CUT

QUICK = ("--workers", "1")


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    main_arguments = ["trace", *map(str, arguments)]
    with pytest.raises(SystemExit) as left:
        main(main_arguments)
    out, err = capsys.readouterr()
    assert left.value.code == 0, err
    return out


def failure(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that a failing command leaves."""
    with pytest.raises(SystemExit) as left:
        main(["trace", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert left.value.code == 2
    assert not out
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


def test_simulate_prints_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--k", 160, "--sizes", "1k,2k,400", "--policies", "lru,two_rate,two_rate_tier,belady", "--skip", 100)
    report = json.loads(run(capsys, "simulate", CUT, *options, *QUICK, "--json"))
    results = report["results"]
    assert [result["size"] for result in results[:3]] == [160, 320, 400]
    assert {result["policy"] for result in results} == {"lru", "two_rate", "two_rate_tier", "belady"}
    assert all(0 < result["miss_rate"] < 1 for result in results)
    assert report["k"] == 160
    assert report["hints"][0]["recall"] < 1


def test_simulate_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "simulate", CUT, "--sizes", "2k", "--policies", "lru", "--layers", "9,3", "--skip", 20, *QUICK)
    assert "120 steps, 2 layers, k = 160" in out
    assert "B = 320" in out
    assert "hint of the recorded layer before" in out


def test_all_policies_but_those_without_their_scores(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--k", 320, "--sizes", "1k", "--policies", "all", "--layers", 3, *QUICK, "--json")
    report = json.loads(run(capsys, "simulate", CUT, *options))
    names = {result["policy"] for result in report["results"]}
    assert "two_rate" in names
    assert "two_rate_tier" not in names
    assert report["hints"] == []  # one layer has none before it


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--k", "100"), "can be read with k = 160, 320, got k = 100"),
        (("--k", "0"), "--k must be at least 1, got 0"),
        (("--sizes", "0.5k"), "a size must be at least k = 160, so that a selection fits, got 80"),
        (("--sizes", ""), "--sizes takes numbers and multiples of k, '1k,2k,500', got ''"),
        (("--record-bytes", "0"), "--record-bytes must be at least 1, got 0"),
        (("--seed", "-1"), "--seed must be at least 0, got -1"),
        (("--sizes", "2q"), "--sizes takes numbers and multiples of k, '1k,2k,500', got '2q'"),
        (("--sizes", "1e12"), "--sizes takes numbers from k = 160 up"),
        (("--policies", "lru,mru"), "--policies takes lru, "),
        (("--k", "320", "--policies", "two_rate_tier"), "two_rate_tier needs the positions ranked k + 1 to 2k"),
        (("--skip", "120"), "skip must leave some of the trace's 120 steps, got 120"),
        (("--layers", "3,5"), "has layers 3, 9, 14, 20, got 5"),
        (("--layers", "x"), "--layers must be whole numbers"),
        (("--workers", "0"), "--workers must be at least 1, got 0"),
    ],
)
def test_what_simulate_refuses(capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str) -> None:
    assert message in failure(capsys, "simulate", CUT, *options)


def test_files_that_are_none(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "cannot be read: No such file" in failure(capsys, "simulate", tmp_path / "a.hst")
    (tmp_path / "a.npz").write_bytes(CUT.read_bytes()[:5000])
    assert "is not a whole .npy or .npz file" in failure(capsys, "simulate", tmp_path / "a.npz")
    (tmp_path / "a.txt").write_text("text")
    assert "is not a trace" in failure(capsys, "simulate", tmp_path / "a.txt")


def test_plot_of_a_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = run(capsys, "simulate", CUT, "--sizes", "1k,2k", "--policies", "lru,fifo", "--layers", 3, *QUICK, "--json")
    (tmp_path / "r.json").write_text(out)
    drawn = run(capsys, "plot", tmp_path / "r.json", "--format", "png").split()
    assert [Path(path).name for path in drawn] == ["r-steps.png", "r-sizes.png", "r-layers.png", "r-locality.png"]
    assert "must be one of 160, 320, got 640" in failure(capsys, "plot", tmp_path / "r.json", "--size", 640)
    assert "--format takes png and svg" in failure(capsys, "plot", tmp_path / "r.json", "--format", "pdf")
    assert "does not exist" in failure(capsys, "plot", CUT, "--out", tmp_path / "no" / "where")


def test_a_report_under_another_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = run(capsys, "simulate", CUT, "--sizes", "1k", "--policies", "lru", "--layers", 3, *QUICK, "--json")
    path = tmp_path / "r.txt"
    path.write_text(out)
    assert len(run(capsys, "plot", path, "--format", "png").split()) == 4
    message = failure(capsys, "plot", path, "--skip", 40, "--policies", "zzz", "--sizes", -1)
    assert f"--sizes, --policies, --skip are for a trace, and {path} is a report" in message
    assert "is no trace but JSON" in failure(capsys, "simulate", path)
    path.write_text(json.dumps(json.loads(out) | {"results": []}))
    assert f"the report {path} must have a list of one or more results" in failure(capsys, "plot", path)


def test_slots_for_more_than_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--policies", "lru,s3_fifo", "--layers", "3,9", *QUICK, "--json")
    results = json.loads(run(capsys, "simulate", CUT, "--sizes", "7200,1e8", *options))["results"]
    assert [result.pop("size") for result in results] == [7200, 10**8, 7200, 10**8]
    assert results[0] == results[1]
    assert results[2] == results[3]


def test_a_layer_that_is_named_twice_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--sizes", "1k", "--policies", "lru", *QUICK, "--json")
    twice = json.loads(run(capsys, "simulate", CUT, "--layers", "3,3,14", *options))
    assert twice == json.loads(run(capsys, "simulate", CUT, "--layers", "3,14", *options))


def test_record_then_simulate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "model", "LlamaForCausalLM", num_layers=2)
    prompt = ("--prompt", "To be recorded, " * 6, "--raw", "--max-tokens", 12, "--ignore-stop", "--top-k", 16)
    out = tmp_path / "t.hst"
    assert run(capsys, "record", model, "--out", out, *prompt).split() == [str(out)]
    trace = open_trace(out)
    assert (trace.num_steps, trace.num_lines, trace.k) == (11, 2, 16)
    assert trace.about["selector"] == "AttentionMass"
    report = json.loads(run(capsys, "simulate", out, "--k", 8, "--policies", "lru,two_rate_tier", *QUICK, "--json"))
    assert report["record_bytes"] == trace.about["record_bytes"]
    assert "exists already" in failure(capsys, "record", model, "--out", out, *prompt)
    assert "does not exist" in failure(capsys, "record", model, "--out", tmp_path / "no" / "t.hst", *prompt)
    run(capsys, "record", model, "--selector", "quest", "--scores", "--out", tmp_path / "q.hst", *prompt)
    assert open_trace(tmp_path / "q.hst").runners_up is not None
