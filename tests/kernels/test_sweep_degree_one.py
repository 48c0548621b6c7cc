"""Degree 1 in one causal sweep without a GPU: its arithmetic and how its warps wait."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from gfsa.kernels.launching import NO_MASK, SPANS
from gfsa.operators import Visibility
from support import gluon_on_cpu
from support.gluon_on_cpu import Descriptor, Number, Pointer
from support.packed_cases import packed

ROOM = "gfsa.kernels"


@pytest.fixture
def kernel() -> Iterator[Any]:
    names = ("gluon_short", "gluon_sweep")
    with gluon_on_cpu.on_cpu(*(f"{ROOM}.{name}" for name in names)) as modules:
        yield modules[-1].filter_sweep


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize(
    # batch, heads, group, tokens, heads at a time, programs
    "shape",
    [
        (1, 2, 2, 512, 2, 2),
        # the last block is not full; heads do not divide by what is worked on at a time
        (1, 3, 1, 300, 2, 3),
        # one program does it all
        (1, 2, 1, 260, 2, 1),
        # a second warpgroup without queries
        (2, 1, 1, 50, 128, 2),
        (1, 1, 1, 1, 1, 1),
    ],
)
def test_the_filter(kernel: Any, shape: tuple[int, ...], tile: int, keeps: bool) -> None:
    check(kernel, shape, tile, keeps)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("visible", [None, packed([130, 70, 100])])
def test_the_exclusive_term(kernel: Any, visible: Visibility | None, keeps: bool) -> None:
    check(kernel, (1, 4, 2, 300, 4, 3), 128, keeps, visible, exclusive=True)


@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize(
    # heads, group, tokens, heads at a time, programs; what they see
    ("shape", "visible"),
    [
        # documents that begin on the diagonal, in a tile before it, and where tiles begin
        ((2, 2, 512, 2, 2), packed([130, 62, 64, 128, 1, 127], [512])),
        # shorter than a tile, and of one token; the last block is not full
        ((3, 1, 300, 2, 3), packed([1] * 20 + [30, 1, 100, 1, 1, 50, 97])),
        # the second warpgroup sees the diagonal alone, in a block whose first one sees four tiles
        ((1, 1, 700, 1, 6), packed([580, 60, 60])),
        # ... and has no queries
        ((1, 1, 560, 1, 2), packed([300, 220, 40])),
        # windows: in the diagonal, over several tiles, and as long as all tokens
        ((2, 1, 400, 2, 4), Visibility(causal=True, window=1)),
        ((2, 1, 640, 2, 3), Visibility(causal=True, window=70)),
        ((2, 2, 640, 2, 1), Visibility(causal=True, window=200)),
        ((1, 1, 300, 1, 2), Visibility(causal=True, window=300)),
        ((1, 1, 600, 1, 3), packed([333, 150, 117], window=140)),
        ((1, 1, 1, 1, 1), packed([1])),
    ],
)
def test_documents_and_windows(
    kernel: Any, shape: tuple[int, ...], visible: Visibility, tile: int
) -> None:
    batch = 1 if visible.documents is None else len(visible.documents)
    check(kernel, (batch, *shape), tile, False, visible)


@pytest.mark.parametrize("at_once", [1, 3])
@pytest.mark.parametrize("visible", [None, packed([300, 1, 1, 348], [50] * 13, window=400)])
def test_more_programs_than_a_gpu_holds(
    kernel: Any, visible: Visibility | None, at_once: int
) -> None:
    check(kernel, (2, 2, 2, 650, 2, 24), 128, False, visible, at_once)


@pytest.mark.parametrize("numbers", [[5] * 300 + [0] * 300, [3] * 100 + [1] * 250 + [2] * 250])
def test_it_ends_if_documents_are_out_of_order(
    kernel: Any, numbers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they see is the caller's mistake; a GPU that waits forever would be worse."""
    monkeypatch.setattr(gluon_on_cpu, "PATIENCE", 5.0)
    documents = torch.tensor(numbers)[None]
    visible = Visibility(causal=True, documents=documents, in_order=True)
    out, *_ = run(kernel, (1, 1, 1, 600, 1, 2), 128, False, visible)[0]
    assert np.isfinite(out).all()


@pytest.mark.parametrize(("tile", "tiles"), [(64, 2 + 4 + 2 + 2), (128, 1 + 2 + 1 + 1)])
def test_no_tile_of_another_document_is_read(
    kernel: Any, tile: int, tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = gluon_on_cpu.moved_tiles(monkeypatch)
    check(kernel, (1, 2, 2, 512, 2, 2), tile, False, packed([256, 128, 128]))
    # of keys and of values, which both query heads share
    assert taken.count(1) == 2 * 2 * tiles


def run(
    kernel: Any,
    shape: tuple[int, ...],
    tile: int,
    keeps: bool,
    visible: Visibility | None = None,
    at_once: int | None = None,
    exclusive: bool = False,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """What the kernel gives and what it should: the output, U and logsumexps.

    Args:
        visible: documents and windows; a causal mask alone by default.
        at_once: programs that run at a time, all by default.
    """
    batch, heads, group, n, span, programs = shape
    draw = np.random.default_rng(n)
    dim, scale = 16, 0.3
    q = draw.normal(size=(batch, heads, n, dim))
    k, v = draw.normal(size=(2, batch, heads // group, n, dim))
    # a token without a direction of its own
    v[0, 0, n // 2] = 0.0
    coeffs = draw.normal(size=(heads, 3))
    u, out = (np.full(q.shape, np.nan) for _ in range(2))
    lse = np.full((batch, heads, (n + 15) // 16 * 16), np.nan)
    total, blocks = batch * heads, -(-n // 128)
    seen = Visibility(causal=True) if visible is None else visible
    spans, kind = np.zeros(0, dtype=int), NO_MASK
    if visible is not None:
        spans, kind = visible.spans(n, torch.device("cpu")).numpy().astype(int), SPANS
    stride = 2 * n if len(spans) > 1 else 0
    numbers = (total, heads, group, n, scale, blocks, span, 0, 0, 0, stride)
    counter, unread = np.zeros(1, dtype=int), np.zeros(1)
    gluon_on_cpu.launch(
        kernel,
        programs,
        *(Descriptor(x, rows) for x, rows in ((q, 64), (k, tile), (v, tile), (u, 64), (out, 64))),
        *(Pointer(x.reshape(-1)) for x in (unread, unread, lse, coeffs, counter, spans)),
        *(Number(x) if isinstance(x, int) else x for x in numbers),
        *(dim, tile, 2, kind, 1, 3, keeps, exclusive),
        at_once=at_once,
    )
    scores = scale * q @ k.repeat(group, 1).swapaxes(-1, -2)
    hidden = ~seen.rows(0, n, n, torch.device("cpu")).numpy()
    scores[np.broadcast_to(hidden, scores.shape)] = -np.inf
    expected_lse = np.logaddexp.reduce(scores, -1)
    values = v.repeat(group, 1)
    once = np.exp(scores - expected_lse[..., None]) @ values
    c0, c1, share = coeffs.T[:, None, :, None, None]
    expected = c0 * values + c1 * once
    if exclusive:
        squares = (values**2).sum(-1, keepdims=True)
        along = (once * values).sum(-1, keepdims=True) / np.where(squares > 0, squares, 1)
        expected -= share * along * values
    return [out, u, lse], [expected, once, expected_lse]


def check(
    kernel: Any,
    shape: tuple[int, ...],
    tile: int,
    keeps: bool,
    visible: Visibility | None = None,
    at_once: int | None = None,
    exclusive: bool = False,
) -> None:
    got, wanted = run(kernel, shape, tile, keeps, visible, at_once, exclusive)
    (out, u, lse), (expected, once, expected_lse) = got, wanted
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-12)
    if keeps:
        np.testing.assert_allclose(u, once, rtol=0, atol=1e-12)
    else:
        assert np.isnan(u).all()
    n = shape[3]
    np.testing.assert_allclose(lse[..., :n], expected_lse / np.log(2), rtol=0, atol=1e-12)
    assert np.isinf(lse[..., n:]).all()
