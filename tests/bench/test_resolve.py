"""The resolve bench over a pretended GPU: what it counts, checks and names. Times are the GPU's business."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hisparse.bench import resolve_figures
from hisparse.bench.exact_misses import exact_misses
from hisparse.bench.provenance import commit_here
from hisparse.bench.resolve import bench
from hisparse.bench.resolve_pool import BenchPool, HostRecords
from hisparse.bench.resolve_setup import Setup, check_batches
from hisparse.bench.resolve_sweep import sweep
from hisparse.bench.synth import Setting
from hisparse.bench.trace import generated
from hisparse.commands.main import main
from hisparse.errors import HiSparseError
from tests.bench.fake_gpu import fake_gpu

SETTING = Setting(steps=12, batch=3, k=64, context=700, churn=0.3)
KEYS = {
    "device", "driver", "torch", "commit", "trace", "churn", "seed", "batch", "k", "buffer", "record_bytes",
    "context", "steps", "warm_steps", "layers", "host_gib", "pages", "policy", "us", "us_p10", "us_p50", "us_p90",
    "us_no_io", "us_alone", "us_no_io_alone", "us_launch", "misses", "miss_rate", "gb_per_s", "copy_gb_per_s",
    "us_of_copy", "ratio_to_copy", "followers", "lines", "host_ranges",
    "rebuild_us", "rebuilds_a_call", "rebuild_share", "exhausted", "failed", "checked",
}  # fmt: skip


@pytest.fixture
def setup() -> Setup:
    return Setup(generated("tiny", SETTING), buffer=128, record_bytes=32, warm_steps=1, layers=2, commit="abc")


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with fake_gpu(monkeypatch):
        yield


@pytest.mark.parametrize("batch", [1, 3])
def test_a_result_has_all_keys_and_true_counts(setup: Setup, batch: int) -> None:
    (result,) = bench(setup, [batch])
    assert result.keys() == KEYS
    assert (result["batch"], result["steps"], result["commit"]) == (batch, 11, "abc")
    assert (result["checked"], result["failed"], result["exhausted"]) == (True, 0, 0)
    assert result["miss_rate"] == pytest.approx(result["misses"] / (batch * 64), abs=1e-4)
    json.dumps(result)


@pytest.mark.parametrize(("layers", "policy"), [(1, "lru"), (3, "lru"), (2, "fifo")])
def test_misses_are_those_of_the_specification(setup: Setup, layers: int, policy: str) -> None:
    """Every layer is driven, also where the layers do not halve; shuffled rows change ties, and hardly the count."""
    (result,) = bench(replace(setup, layers=layers, policy=policy, exact_misses=True, warm_steps=0), [3])
    assert result[f"misses_exact_{policy}"] == round(exact_misses(replace(setup, policy=policy, warm_steps=0), 3), 2)
    assert result["miss_ratio"] == pytest.approx(1, abs=0.02)
    if policy == "fifo":
        assert result["rebuilds_a_call"] == 1


def test_groups_with_ranges_of_their_own_and_several_lines_a_request(setup: Setup) -> None:
    """Every layer of a group is checked against its own records; lines of one request share its rows."""
    trace = setup.trace.with_lines(2)
    assert (trace.steps, trace.batch) == (6, 6)
    assert (trace.selections[1, 0, 3] == setup.trace.selections[3, 0, 1]).all()
    (result,) = bench(replace(setup, trace=trace, own_ranges=True, followers=2), [4])
    assert (result["followers"], result["lines"], result["host_ranges"], result["failed"]) == (2, 2, 6, 0)
    for changes, message in (
        ({"followers": 1}, "need own_ranges"),
        ({"trace": trace, "exact_misses": True}, "one line of a request, got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(setup, **changes)
    with pytest.raises(ValueError, match="whole requests of 2 lines each, got 3"):
        check_batches(trace, [3])


def test_a_wrong_record_is_found(setup: Setup) -> None:
    pool = BenchPool(setup, 2, HostRecords(setup, 3))
    pool.warm_up()
    pool.run_checked()
    pool.host.records.zero_()
    with pytest.raises(HiSparseError, match="step 1, layer 0: a slot holds another record"):
        pool.run_checked()


def test_warm_up_and_restore_leave_no_trace(setup: Setup) -> None:
    pool = BenchPool(replace(setup, warm_steps=0), 2, HostRecords(setup, 2))
    pool.warm_up()
    assert (pool.pool.tables.slot_of_row == -1).all()
    before = pool.snapshot()
    pool.run_checked()
    assert int(pool.pool.counters.misses.sum())
    pool.restore(before)
    assert not int(pool.pool.counters.misses.sum())
    assert (pool.pool.tables.row_of_slot == -1).all()


def test_sweep_measures_every_point_once(setup: Setup) -> None:
    lines = list(sweep(setup))
    assert [(line["buffer"], line["batch"], line["panels"]) for line in lines] == [
        (65, 3, ["buffer"]), (96, 3, ["buffer"]), (128, 1, ["batch"]), (128, 2, ["batch"]), (128, 3, ["buffer"]),
        (192, 3, ["buffer"]), (256, 3, ["buffer"]),
    ]  # fmt: skip
    for line in lines:
        assert line["us_io"] + line["us_probe"] + line["us_rest"] == pytest.approx(line["us"], abs=0.01)


def test_figures_of_recorded_traces(monkeypatch: pytest.MonkeyPatch, recorded: Path) -> None:
    monkeypatch.setattr(resolve_figures, "RECORDED_TRACES", (recorded.stem,))
    monkeypatch.setattr(resolve_figures, "RECORDED_LAYERS", (0, 2))
    monkeypatch.setattr(resolve_figures, "RECORDED_BUFFERS", (17, 32))
    lines = list(resolve_figures.misses_of_real_traces(recorded.parent, "abc"))
    assert [(line["kind"], line["buffer"], line["batch"], line["layers"]) for line in lines] == [
        ("misses", 17, 8, 2), ("misses", 32, 8, 2),
    ]  # fmt: skip
    for line in lines:
        assert {"us", "us_no_io", "misses", "miss_rate", "misses_exact_lru", "miss_ratio"} < line.keys()
        assert (line["commit"], line["trace_layers"], line["warm_steps"]) == ("abc", [0, 2], 0)


TINY = ("--steps", "12", "--requests", "3", "--k", "64", "--context", "700", "--record-bytes", "32", "--layers", "2")


def command(*arguments: object) -> None:
    with pytest.raises(SystemExit) as left:
        main(["bench", "resolve", *TINY, *map(str, arguments)])
    assert not left.value.code


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    command("--batch", "1,3", "--exact-misses", "--commit", "abc")
    out, err = capsys.readouterr()
    about, names, *lines = out.splitlines()
    assert about.startswith("none, commit abc: trace generated, k 64, B 128, 32 B records, 2 layers, 11 steps, lru")
    assert [line.split()[0] for line in lines] == ["1", "3"]
    assert {len(line) for line in lines} == {len(names)}
    assert err.startswith("pins 1.00 GiB of host memory")


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    command("--json", "--no-check", "--buffer", 65, "--policy", "fifo", "--seed", 1)
    (one, three) = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (one["batch"], three["batch"]) == (1, 3)
    assert (one["checked"], one["buffer"], one["policy"], one["seed"]) == (False, 65, "fifo", 1)
    assert one["commit"] == commit_here()


def test_the_command_sweeps_and_draws(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command("--sweep", "--batch", 2, "--no-check", "--figure", tmp_path / "sweep.png")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["batch"] for line in lines if "buffer" in line["panels"]} == {2}
    assert (tmp_path / "sweep.png").stat().st_size > 10_000
