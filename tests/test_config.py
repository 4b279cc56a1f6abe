"""What a configuration accepts, what it refuses, and with which words."""

import dataclasses
import json
from pathlib import Path

import pytest

from hisparse.config import SELECTORS, HiSparseConfig, read_config
from hisparse.order import POLICIES
from hisparse.selectors import AGGREGATIONS


def test_the_defaults_work() -> None:
    config = HiSparseConfig()
    assert config.buffer_for(config.top_k_for(None)) == 1024
    assert config.top_k_for(2048) == 2048
    assert HiSparseConfig(top_k=100).top_k_for(2048) == 100
    assert HiSparseConfig(top_k=4096).top_k_for(2048) == 2048
    assert HiSparseConfig.from_mapping({}) == config
    assert HiSparseConfig.from_mapping(dataclasses.asdict(config)) == config


def test_a_configuration_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        HiSparseConfig().top_k = 3  # type: ignore[misc]


@pytest.mark.parametrize("top_k", [16, 17, 100])
def test_the_default_reservation_is_twice_top_k(top_k: int) -> None:
    assert HiSparseConfig(top_k=top_k).buffer_for(top_k) == 2 * top_k


def test_the_smallest_reservation() -> None:
    assert HiSparseConfig(top_k=64, device_buffer_size=65).buffer_for(64) == 65


@pytest.mark.parametrize("device_buffer_size", [1, 63, 64])
def test_a_reservation_not_above_top_k(device_buffer_size: int) -> None:
    message = rf"above top_k 64, .* got {device_buffer_size}: use at least 65, 128 is a good start"
    with pytest.raises(ValueError, match=message):
        HiSparseConfig(top_k=64, device_buffer_size=device_buffer_size)


def test_a_steps_tokens() -> None:
    assert HiSparseConfig(max_running_requests=8, prefill_chunk=100).step_tokens == 108
    assert HiSparseConfig(max_running_requests=8, prefill_chunk=100, max_num_batched_tokens=108).step_tokens == 108
    assert HiSparseConfig(max_num_batched_tokens=8192).step_tokens == 8192
    with pytest.raises(ValueError, match=r"at least max_running_requests 8 \+ prefill_chunk 100 = 108, .* got 107"):
        HiSparseConfig(max_running_requests=8, prefill_chunk=100, max_num_batched_tokens=107)


@pytest.mark.parametrize(
    "key", ["top_k", "device_buffer_size", "max_running_requests", "prefill_chunk", "max_num_batched_tokens"]
)
@pytest.mark.parametrize("value", [0, -1, 1.5, "64", True])
def test_whole_numbers(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"{key} must be a whole number of at least 1, got {value!r}"):
        HiSparseConfig.from_mapping({key: value})


@pytest.mark.parametrize("key", ["max_running_requests", "prefill_chunk"])
def test_what_has_no_default_to_go_back_to(key: str) -> None:
    with pytest.raises(ValueError, match=f"{key} must be a whole number of at least 1, got None"):
        HiSparseConfig.from_mapping({key: None})


@pytest.mark.parametrize("value", [0.5, 1, 4.0, None])
def test_ratios(value: float | None) -> None:
    assert HiSparseConfig(host_to_device_ratio=value).host_to_device_ratio == value


@pytest.mark.parametrize("value", [0, -2.0, float("nan"), "4", True])
def test_a_ratio_that_is_no_positive_number(value: object) -> None:
    with pytest.raises(ValueError, match=rf"host_to_device_ratio must be a finite number above 0, got {value!r}"):
        HiSparseConfig.from_mapping({"host_to_device_ratio": value})


def test_a_ratio_without_bound() -> None:
    with pytest.raises(ValueError, match="host_to_device_ratio"):
        HiSparseConfig(host_to_device_ratio=float("inf"))


@pytest.mark.parametrize(
    ("key", "choices"),
    [("selector", SELECTORS), ("policy", tuple(POLICIES)), ("quest_aggregation", tuple(AGGREGATIONS))],
)
def test_choices(key: str, choices: tuple[str, ...]) -> None:
    for choice in choices:
        assert getattr(HiSparseConfig.from_mapping({key: choice}), key) == choice
    with pytest.raises(ValueError, match=rf"{key} must be one of {', '.join(choices)}, got 'zzz'$"):
        HiSparseConfig.from_mapping({key: "zzz"})
    near = choices[0] + "x"
    with pytest.raises(ValueError, match=rf"got '{near}'; did you mean '{choices[0]}'\?"):
        HiSparseConfig.from_mapping({key: near})


@pytest.mark.parametrize("value", [7, None])
def test_a_choice_that_is_no_text(value: object) -> None:
    with pytest.raises(ValueError, match=f"policy must be one of .* got {value!r}"):
        HiSparseConfig.from_mapping({"policy": value})


def test_a_flag_that_is_no_flag() -> None:
    with pytest.raises(ValueError, match="quest_per_kv_head must be true or false, got 1"):
        HiSparseConfig.from_mapping({"quest_per_kv_head": 1})


def test_quest_needs_a_page() -> None:
    with pytest.raises(ValueError, match=r"top_k must be at least 16 \(one Quest page\), got 15"):
        HiSparseConfig(selector="quest", top_k=15)
    assert HiSparseConfig(top_k=15, selector="all").top_k == 15


@pytest.mark.parametrize(
    ("key", "near"),
    [("topk", "top_k"), ("device_buffer", "device_buffer_size"), ("host_device_ratio", "host_to_device_ratio")],
)
def test_an_unknown_key_names_the_nearest(key: str, near: str) -> None:
    with pytest.raises(ValueError, match=rf"unknown configuration key '{key}'; did you mean '{near}'\?"):
        HiSparseConfig.from_mapping({"top_k": 64, key: 1})


def test_an_unknown_key_near_nothing_lists_the_valid_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown configuration key 'zzz'; valid keys: top_k, device_buffer_size, "):
        HiSparseConfig.from_mapping({"zzz": 1})


def test_reading_json_text() -> None:
    assert read_config(' \n{"top_k": 64, "policy": "fifo"}') == {"top_k": 64, "policy": "fifo"}


def test_reading_a_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"top_k": 64}), encoding="utf-8")
    assert read_config(str(path)) == {"top_k": 64}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "the configuration is not valid JSON: .*line 1 column 2"),
        ('{"top_k": }', "the configuration is not valid JSON"),
        ("no-such-file.json", r"takes a JSON object or the path of one, got 'no-such-file.json' \(.*No such file"),
        ("", "takes a JSON object or the path of one, got ''"),
    ],
)
def test_unreadable_configurations(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_config(text)


def test_a_file_that_holds_no_object(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("[1, 2]", encoding="utf-8")
    with pytest.raises(ValueError, match="the configuration must be a JSON object, got list"):
        read_config(str(path))


def test_a_file_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b'{"policy": "\xff"}')
    with pytest.raises(ValueError, match=r"config\.json"):
        read_config(str(path))


def test_text_to_configuration() -> None:
    values = read_config('{"top_k": 2048, "device_buffer_size": 4096}')
    assert HiSparseConfig.from_mapping(values) == HiSparseConfig(top_k=2048, device_buffer_size=4096)
