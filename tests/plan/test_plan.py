"""Plans: what is recommended, what the link takes, and the paper's arithmetic."""

from pathlib import Path

import pytest

from hisparse.checkpoint import load
from hisparse.config import HiSparseConfig
from hisparse.engine import build_engine
from hisparse.plan.footprint import per_token, resident_bytes
from hisparse.plan.paper import compare_with_paper
from hisparse.plan.plan import Plan, make_plan, recommended_keys
from hisparse.plan.question import ask
from tests.plan.families import EVERY_FAMILY, FP8_KEYS, ask_named, ask_tiny, write_family


def plan_named(name: str = "glm-5.1", /, **changes: str | int | float) -> Plan:
    return make_plan(ask_named(name, **changes))


def test_reservations_are_multiples_of_top_k_or_the_configurations() -> None:
    assert [option.device_buffer_size for option in plan_named().options] == [4096, 6144, 8192]
    config = HiSparseConfig(top_k=1024, device_buffer_size=1500)
    question = ask("glm-5.1", config, device_memory="141GB", host_memory="2TB", gpus=8)
    assert [option.device_buffer_size for option in make_plan(question).options] == [1500]


def test_link_time_is_the_misses_bytes_over_the_link() -> None:
    option = plan_named(context="128K", link=50.0).options[0]
    fetched = 0.134 * 2048 * 78 * 1152
    assert option.link_ms_per_request == pytest.approx(1e3 * fetched / 50e9)
    assert option.link_ms == option.capacity.requests * option.link_ms_per_request


def test_shared_layers_are_fetched_too_but_only_anchors_cannot_be_prefetched() -> None:
    option = plan_named("glm-5.2", context="128K").options[0]
    assert option.misses_per_request == pytest.approx(0.134 * 2048 * 78)
    assert option.anchor_share == 21 / 78


def test_the_budget_holds_requests_back() -> None:
    plan = plan_named(context="40K", step_budget=5.0)
    for option in plan.options:
        assert option.requests_in_budget * option.link_ms_per_request <= 5.0
        more = option.requests_in_budget + 1
        assert more > option.capacity.requests or more * option.link_ms_per_request > 5.0
    assert plan.best is not None
    assert plan.best.requests_in_budget == max(option.requests_in_budget for option in plan.options)


def test_of_equals_the_one_that_fetches_least() -> None:
    plan = plan_named("glm-5.2", context="1M")  # the host's memory limits all three alike
    assert {option.capacity.requests for option in plan.options} == {2}
    assert plan.recommended == HiSparseConfig(top_k=2048, device_buffer_size=8192, max_running_requests=2)


def test_a_history_that_fits_its_slots_needs_the_fewest() -> None:
    best = plan_named(context="4096", host_memory="20GB").best
    assert best is not None
    assert (best.device_buffer_size, best.link_ms) == (4096, 0)


def test_heat_takes_its_share_of_the_device_and_saves_misses() -> None:
    lru, two_rate = (
        make_plan(ask_named("glm-5.1", HiSparseConfig(policy=policy), context="128K")).options[0]
        for policy in ("lru", "two_rate")
    )
    assert two_rate.footprint is not None
    assert two_rate.footprint.heat_bytes == two_rate.footprint.layout.heat_bytes
    assert two_rate.footprint.device_bytes <= two_rate.question.cache_bytes
    assert two_rate.capacity.requests <= lru.capacity.requests
    assert (two_rate.miss_rate, lru.miss_rate) == pytest.approx((0.115, 0.134))


@pytest.mark.parametrize("name", EVERY_FAMILY)
def test_the_recommendation_is_what_the_engine_then_allocates(name: str, tmp_path: Path) -> None:
    folder = write_family(tmp_path / "tiny", name)
    plan = make_plan(ask_tiny(folder, HiSparseConfig(top_k=48, policy="fifo"), device_memory="8MB"))
    assert plan.best is not None
    assert plan.best.footprint is not None
    keys = recommended_keys(plan.best)
    assert keys["policy"] == "fifo"
    config = HiSparseConfig.from_mapping(keys)
    cache = build_engine(load(folder), config, [640] * config.max_running_requests).runner.cache
    assert cache.layout == plan.best.footprint.layout


def test_what_fp8_index_keys_would_give_is_what_they_give() -> None:
    other = plan_named(context="128K").best_with_fp8_index_keys
    fp8 = make_plan(ask_named("glm-5.1", FP8_KEYS, context="128K"))
    assert other is not None
    assert fp8.best is not None
    assert other.capacity == fp8.best.capacity
    assert recommended_keys(other) == recommended_keys(fp8.best)
    assert recommended_keys(other)["index_cache_dtype"] == "fp8"
    assert fp8.best_with_fp8_index_keys is None  # they are in FP8 already


@pytest.mark.parametrize(
    ("changes", "limit"),
    [({"host_memory": "200GB"}, "host_memory"), ({"step_budget": 0.5}, "budget"), ({"context": "4K"}, "slots")],
    ids=str,
)
def test_fp8_index_keys_are_not_proposed_where_others_limit(changes: dict[str, str | float], limit: str) -> None:
    plan = plan_named(**{"context": "128K"} | changes)
    assert plan.best is not None
    assert plan.best.limited_by == limit
    assert plan.best_with_fp8_index_keys is None


def test_only_an_indexer_has_index_keys(tmp_path: Path) -> None:
    plan = make_plan(ask_tiny(write_family(tmp_path / "tiny", "llama"), device_memory="8MB", context="4K"))
    assert plan.question.with_fp8_index_keys() is None
    assert plan.best_with_fp8_index_keys is None


def test_data_parallel_attention_has_different_requests_on_each_gpu() -> None:
    dp, tp = plan_named(attention="dp"), plan_named(attention="tp")
    assert (dp.question.machine.independent_caches, tp.question.machine.independent_caches) == (8, 1)
    assert dp.question.cache_bytes < tp.question.cache_bytes  # attention's weights are on every GPU
    assert dp.question.family.record_bytes == tp.question.family.record_bytes  # one record for all heads


def test_grouped_attention_divides_its_heads(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "tiny", "llama")  # two KV heads
    one, two = ask_tiny(folder, gpus=1), ask_tiny(folder, gpus=2)
    assert not two.machine.data_parallel
    assert two.family.record_bytes == one.family.record_bytes // 2
    assert ask_tiny(folder, gpus=3).machine.data_parallel  # what cannot be divided is not
    with pytest.raises(ValueError, match="2 KV heads cannot be shared out to 3 GPUs: use --attention dp"):
        ask_tiny(folder, gpus=3, attention="tp")


def test_the_papers_arithmetic() -> None:
    """Its sections 1, 2.2, 3.2 and 3.3; what it calls KV seems to be 1,280 B a layer, index keys counted in."""
    medium, long = (ask_named("glm-5.1", FP8_KEYS, context=context) for context in ("40K", "128K"))
    sizes = per_token(long.family)
    assert 131_072 * (sizes.records + sizes.selection_state) == pytest.approx(13.09e9, rel=5e-3)
    assert resident_bytes(medium.family, 40_960) == pytest.approx(4.1e9, rel=5e-3)  # "up to 4 GB"
    assert plan_named().options[0].question.family.record_bytes * 78 * 4096 == pytest.approx(0.37e9, rel=1e-2)
    assert 131_072 * sizes.selection_state == pytest.approx(1.35e9, rel=1e-2)  # not "hundreds of bytes a token"
    assert 8 * medium.resident_requests_per_gpu == 56  # "about 60"
    assert 8 * long.resident_requests_per_gpu == 16  # "about 15"


def test_the_comparison_with_the_paper_is_glm_5_1s_alone() -> None:
    rows = {row.what: row for row in compare_with_paper(ask_named())}
    assert rows["records of 128K"].here == "11.8 GB"
    assert "13.1 GB" in rows["records of 128K"].note
    assert rows["requests of 128K, full KV"].here == "8"
    assert "1.35 GB" in rows["selection state of a token"].note
    assert compare_with_paper(ask_named("glm-5.2")) == []
    assert compare_with_paper(ask_named("deepseek-v3.2")) == []
