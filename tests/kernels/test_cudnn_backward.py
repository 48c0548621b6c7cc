"""How the gradient by two of cuDNN's works through the heads; asked without a GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from gfsa.kernels.long import cudnn_backward


@pytest.fixture(autouse=True)
def _an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    cudnn_backward.pieces.cache_clear()
    monkeypatch.setattr(cudnn_backward, "multiprocessors", lambda device: 132)


@pytest.mark.parametrize(
    ("batch", "heads", "length", "sizes"),
    [
        (2, 16, 8192, [(1, 4)] * 8),
        (1, 12, 8192, [(1, 4)] * 3),
        (1, 25, 8192, [(1, 4)] * 5 + [(1, 5)]),
        (2, 4, 65536, [(1, 1)] * 8),
        (13, 12, 2048, [(2, 12)] * 5 + [(3, 12)]),
        (3, 16, 4096, [(1, 8)] * 6),
        (1, 2, 2048, [(1, 2)]),
    ],
)
def test_pieces(batch: int, heads: int, length: int, sizes: list[tuple[int, int]]) -> None:
    """Each head of each sequence once, as few at a time as fill the GPU."""
    cuts = cudnn_backward.pieces(batch, heads, length, 0)
    assert [(b.stop - b.start, h.stop - h.start) for b, h in cuts] == sizes
    seen = [(b, h) for bs, hs in cuts for b in range(batch)[bs] for h in range(heads)[hs]]
    assert sorted(seen) == [(b, h) for b in range(batch) for h in range(heads)]
