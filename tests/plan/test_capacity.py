"""The most requests that fit: one more does not."""

from pathlib import Path

import pytest

from hisparse.layout import INT32_LIMIT
from hisparse.plan.capacity import capacity, largest
from hisparse.plan.footprint import footprint
from tests.plan.families import EVERY_FAMILY, ask_named, ask_tiny, write_family

PLENTY = 10**18


@pytest.mark.parametrize("most", [1, 2, 3, 100])
def test_largest_finds_every_border(most: int) -> None:
    for border in range(most + 1):
        assert largest(lambda n, border=border: n <= border, most) == border  # type: ignore[misc]


@pytest.mark.parametrize("name", EVERY_FAMILY)
@pytest.mark.parametrize("room", [(3_000_000, PLENTY), (PLENTY, 3_000_000), (2_000_000, 7_000_000)])
@pytest.mark.parametrize("heated", [False, True])
def test_one_more_request_does_not_fit(name: str, room: tuple[int, int], heated: bool, tmp_path: Path) -> None:
    device_bytes, host_bytes = room
    question = ask_tiny(write_family(tmp_path / "tiny", name))
    for buffer in question.reservations:
        found = capacity(question.family, 640, buffer, *room, heated=heated)
        more = footprint(question.family, 640, found.requests + 1, buffer, heated=heated)
        assert more.device_bytes > device_bytes or more.host_bytes > host_bytes
        assert found.requests == min(found.by_device, found.by_host)
        if found.requests:
            most = footprint(question.family, 640, found.requests, buffer, heated=heated)
            assert most.device_bytes <= device_bytes
            assert most.host_bytes <= host_bytes


def test_what_limits() -> None:
    family = ask_named().family
    one = footprint(family, 131_072, 1, 4096)

    def limit(context: int, buffer: int, device_bytes: int, host_bytes: int) -> str:
        return capacity(family, context, buffer, device_bytes, host_bytes).limited_by

    assert limit(131_072, 4096, 30 * 10**9, PLENTY) == "selection_state"
    assert limit(8192, 8192, 30 * 10**9, PLENTY) == "slots"
    assert limit(131_072, 4096, 30 * 10**9, 2 * one.host_bytes) == "host_memory"
    assert limit(131_072, 4096, PLENTY, PLENTY) == "int32_rows"


def test_tables_stay_int32() -> None:
    found = capacity(ask_named().family, 131_072, 4096, PLENTY, PLENTY)
    assert found.requests == INT32_LIMIT // 131_072
    assert capacity(ask_named().family, 131_072, 4096, 0, 0).requests == 0
