"""Selection state: pages, saved and restored, counted in bytes."""

import pytest
import torch

from tests.caches import small_layout, small_state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_bytes(dtype: torch.dtype) -> None:
    state = small_state(small_layout(), page_shape=(2, 5), dtype=dtype)
    page_bytes = 2 * 10 * dtype.itemsize  # of both layers
    assert state.bytes_per_token == page_bytes / 64
    assert state.used_bytes == 0
    pages = state.pages.allocate(3)
    assert state.used_bytes == 3 * page_bytes
    state.pages.let_go(pages)
    assert state.used_bytes == 0
    assert state.data.nbytes == (8 + 1) * page_bytes  # one is scratch


def test_save_and_restore_into_other_pages() -> None:
    state = small_state(small_layout())
    state.data.fill_(float("nan"))
    state.data[:, [6, 2]] = torch.arange(12.0).view(2, 2, 3)
    saved = state.save([6, 2])
    state.data[:, [6, 2]] = -1  # what was saved is a copy
    state.restore([0, 7], saved)
    assert torch.equal(state.data[:, [0, 7]], torch.arange(12.0).view(2, 2, 3))
    assert (state.data[:, [6, 2]] == -1).all()
    assert state.data[:, [1, 3, 4, 5]].isnan().all()


def test_tables_start_empty() -> None:
    state = small_state(small_layout())
    assert state.page_table.shape == (2, 8)
    assert (state.page_table == -1).all()
    assert state.pages.num_free == 8
