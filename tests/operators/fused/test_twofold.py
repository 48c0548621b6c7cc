"""How the gradient by two of cuDNN's works through the heads; asked without a GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from gfsa.operators.fused import twofold


@pytest.fixture(autouse=True)
def _an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    twofold.pieces.cache_clear()
    monkeypatch.setattr(twofold, "multiprocessors", lambda device: 132)


@pytest.mark.parametrize(
    ("batch", "heads", "length", "is_causal", "sizes"),
    [
        (2, 16, 8192, False, [(1, 8)] * 4),
        (1, 12, 8192, False, [(1, 12)]),
        (1, 25, 8192, False, [(1, 8), (1, 8), (1, 9)]),
        (2, 4, 65536, False, [(1, 1)] * 8),
        (13, 12, 2048, False, [(3, 12)] * 3 + [(4, 12)]),
        (3, 16, 4096, False, [(1, 16)] * 3),
        (1, 2, 2048, False, [(1, 2)]),
        (2, 16, 8192, True, [(2, 16)]),
        (2, 16, 65536, True, [(1, 4)] * 8),
    ],
)
def test_pieces(
    batch: int, heads: int, length: int, is_causal: bool, sizes: list[tuple[int, int]]
) -> None:
    """Each head of each sequence once, as few at a time as fill the GPU."""
    cuts = twofold.pieces(batch, heads, length, is_causal, 0)
    assert [(b.stop - b.start, h.stop - h.start) for b, h in cuts] == sizes
    seen = [(b, h) for bs, hs in cuts for b in range(batch)[bs] for h in range(heads)[hs]]
    assert sorted(seen) == [(b, h) for b in range(batch) for h in range(heads)]
