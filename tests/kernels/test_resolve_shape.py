"""How a selection is spread over a GPU, for GPUs and sizes of all kinds; no GPU needed."""

import pytest

from hisparse.kernels import resolve
from hisparse.kernels.launch import Kernel, LaunchError
from hisparse.kernels.resolve import SHARED_BYTES_PER_SELECTION, Shape, choose_shape, fit_shape

H200, A100, SMALL = (132, 232_000), (108, 166_000), (58, 101_000)  # multiprocessors, shared bytes of a block


def kernel_of(gpu: tuple[int, int], monkeypatch: pytest.MonkeyPatch, threads_each: int = 2048) -> Kernel:
    """A kernel on a GPU whose multiprocessors hold so many threads and 1.1 blocks' worth of shared memory."""
    kernel = Kernel(None, 0, *gpu, can_overlap=True)

    def resident(of: Kernel, threads: int, shared_bytes: int) -> int:
        assert shared_bytes <= of.shared_limit, "asked for more than a block may have"
        each = min(threads_each // threads, int(1.1 * of.shared_limit) // max(shared_bytes, 1))
        return each * of.multiprocessors

    monkeypatch.setattr(resolve, "max_resident_blocks", resident)
    return kernel


@pytest.mark.parametrize("gpu", [H200, A100, SMALL])
@pytest.mark.parametrize(
    "size", [1, 31, 32, 2048, 4 * 2048, 16 * 2048, 32 * 2048, 64 * 2048, 128 * 2048, 104 * 4096, 128 * 4096]
)
def test_every_selection_has_a_place_and_all_blocks_are_resident(
    gpu: tuple[int, int], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = kernel_of(gpu, monkeypatch)
    shape, capacity = fit_shape(kernel, choose_shape(size, kernel.multiprocessors), size)
    assert shape.blocks * capacity >= size
    assert capacity % 32 == 0
    assert shape.copiers <= shape.threads <= 1024
    assert capacity * SHARED_BYTES_PER_SELECTION <= kernel.shared_limit


def test_more_blocks_are_taken_before_a_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernel_of(H200, monkeypatch)
    size = 512 * 4096
    shape, _ = fit_shape(kernel, choose_shape(size, kernel.multiprocessors), size)
    assert shape.blocks == kernel.multiprocessors
    with pytest.raises(LaunchError, match="4194304 selected positions are too many for this GPU: lower top_k or"):
        fit_shape(kernel, choose_shape(2 * size, kernel.multiprocessors), 2 * size)


def test_fewer_blocks_where_fewer_are_resident(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernel_of(H200, monkeypatch)
    shape, capacity = fit_shape(kernel, Shape(1000, 512, 512), 100_000)
    assert shape.blocks == 4 * kernel.multiprocessors
    assert shape.blocks * capacity >= 100_000


def test_a_gpu_that_holds_no_block_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match="too many for this GPU"):
        fit_shape(kernel_of(H200, monkeypatch, threads_each=0), Shape(4, 32, 32), 64)
