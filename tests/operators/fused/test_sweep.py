"""One causal sweep without a GPU: its arithmetic and how its warps and programs wait."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

from gfsa.operators.fused.sweep import launch as sweep
from support import gluon_on_cpu
from support.gluon_on_cpu import Descriptor, Number, Pointer

ROOM = "gfsa.operators.fused.sweep"


@pytest.fixture
def kernels() -> Iterator[list[Any]]:
    """``short/tiles.py`` and the kernel's three modules."""
    names = ("gfsa.operators.fused.short.tiles", *(f"{ROOM}.{x}" for x in ("order", "copies")))
    with gluon_on_cpu.on_cpu(*names, f"{ROOM}.forward") as modules:
        yield modules


def run(
    kernel: Any, batch: int, heads: int, group: int, n: int, span: int, programs: int, parts: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """What the kernel gives and what it should: the output, U and the logsumexps."""
    draw = np.random.default_rng(n)
    dim, scale = 16, 0.3
    q = draw.normal(size=(batch, heads, n, dim))
    k, v = draw.normal(size=(2, batch, heads // group, n, dim))
    coeffs = draw.normal(size=(heads, 3))
    u, out = np.full(q.shape, np.nan), np.full(q.size, np.nan)
    lse = np.full(batch * heads * n, np.nan)
    total, blocks = batch * heads, -(-n // sweep.ROWS)
    flags = np.zeros(total * blocks * 2 + sweep.LOOKED_AT, dtype=int)
    numbers = (total, heads, group, n, scale, blocks, span, heads * n * dim, n * dim, dim)
    gluon_on_cpu.launch(
        kernel,
        programs,
        *(Descriptor(x, sweep.HALF) for x in (q, k, v, u)),
        *(Pointer(x) for x in (out, lse, coeffs.reshape(-1), flags)),
        *(Number(x) if isinstance(x, int) else x for x in numbers),
        dim,
        parts,
        2,
    )
    assert flags[: total * blocks * 2].all()
    scores = scale * q @ k.repeat(group, 1).swapaxes(-1, -2)
    scores[..., ~np.tri(n, dtype=bool)] = -np.inf
    expected_lse = np.logaddexp.reduce(scores, -1)
    a = np.exp(scores - expected_lse[..., None])
    values = v.repeat(group, 1)
    once = a @ values
    c0, c1, c2 = coeffs.T[:, None, :, None, None]
    expected = c0 * values + c1 * once + c2 * (a @ once)
    return [
        (out.reshape(q.shape), expected),
        (u, once),
        (lse.reshape(expected_lse.shape), expected_lse),
    ]


@pytest.mark.parametrize("parts", [1, 2], ids=["64 keys a tile", "128 keys a tile"])
@pytest.mark.parametrize(
    # batch, heads, group, tokens, heads at a time, programs
    "shape",
    [
        # heads that share keys; two programs that need each other's U
        (1, 2, 2, 512, 2, 2),
        # the last block is not full; heads do not divide by what is worked on at a time
        (1, 3, 1, 300, 2, 3),
        # all blocks of one head at once, more programs than blocks
        (1, 1, 1, 600, 1, 6),
        # one program does it all
        (1, 2, 1, 260, 2, 1),
        # a second warpgroup without queries
        (2, 1, 1, 50, 128, 2),
        (1, 1, 1, 1, 1, 1),
    ],
)
def test_the_filter(kernels: list[Any], shape: tuple[int, ...], parts: int) -> None:
    *_, forward = kernels
    for got, expected in run(forward.filter_sweep, *shape, parts):
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)


def test_it_waits_for_u(kernels: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without flags a block would load what no program has stored yet."""
    _, _, copies, forward = kernels
    monkeypatch.setattr(copies, "first_missing", lambda flags, known: known + 32)
    monkeypatch.setattr(gluon_on_cpu, "PATIENCE", 0.5)
    with pytest.raises(AssertionError, match="before it was stored"):
        run(forward.filter_sweep, 1, 1, 1, 600, 1, 5, 2)


def test_each_item_once() -> None:
    """Items of low numbers are the low rows of the heads that are worked on together."""
    names = ("gfsa.operators.fused.short.tiles", f"{ROOM}.order")
    with gluon_on_cpu.on_cpu(*names) as (_, order):
        places = [order.place(Number(i), Number(7), Number(3), Number(4)) for i in range(21)]
    assert len(set(places)) == 21
    assert places[:5] == [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1)]
    # the three heads that are left
    assert places[12:16] == [(4, 0), (5, 0), (6, 0), (4, 1)]
