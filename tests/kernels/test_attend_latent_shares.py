"""How attention over latent records is shared out over the GPU."""

import pytest

from hisparse.kernels.attend_latent import share_of


@pytest.mark.parametrize(
    ("batch", "heads", "k", "share"),
    [(1, 64, 2048, 64), (8, 64, 2048, 128), (16, 64, 2048, 256), (32, 64, 2048, 512), (64, 64, 2048, 1024),
     (132, 64, 2048, 2048), (400, 64, 2048, 2048), (16, 128, 2048, 512),
     (1, 8, 1, 64), (1, 64, 65, 64), (3, 64, 100, 64)],
)  # fmt: skip
def test_all_blocks_fit_at_once(batch: int, heads: int, k: int, share: int) -> None:
    assert share_of(batch, heads, k, multiprocessors=132) == share
