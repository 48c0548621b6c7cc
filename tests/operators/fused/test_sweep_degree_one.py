"""Degree 1 in one causal sweep without a GPU: its arithmetic and how its warps wait."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

from support import gluon_on_cpu
from support.gluon_on_cpu import Descriptor, Number, Pointer

ROOM = "gfsa.operators.fused.sweep"


@pytest.fixture
def kernel() -> Iterator[Any]:
    names = ("order", "copies", "forward", "degree_one")
    with gluon_on_cpu.on_cpu(
        "gfsa.operators.fused.short.tiles", *(f"{ROOM}.{name}" for name in names)
    ) as modules:
        yield modules[-1].attend_sweep


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
    batch, heads, group, n, span, programs = shape
    draw = np.random.default_rng(n)
    dim, scale = 16, 0.3
    q = draw.normal(size=(batch, heads, n, dim))
    k, v = draw.normal(size=(2, batch, heads // group, n, dim))
    coeffs = draw.normal(size=(heads, 3))
    u, out = (np.full(q.shape, np.nan) for _ in range(2))
    length = n if keeps else (n + 15) // 16 * 16
    lse = np.full((batch, heads, length), np.nan)
    total, blocks = batch * heads, -(-n // 128)
    numbers = (total, heads, group, n, scale, blocks, span)
    gluon_on_cpu.launch(
        kernel,
        programs,
        *(Descriptor(x, rows) for x, rows in ((q, 64), (k, tile), (v, tile), (u, 64), (out, 64))),
        *(Pointer(x.reshape(-1)) for x in (lse, coeffs, np.zeros(1, dtype=int))),
        *(Number(x) if isinstance(x, int) else x for x in numbers),
        *(dim, tile, 2, 3, keeps),
    )
    scores = scale * q @ k.repeat(group, 1).swapaxes(-1, -2)
    scores[..., ~np.tri(n, dtype=bool)] = -np.inf
    expected_lse = np.logaddexp.reduce(scores, -1)
    values = v.repeat(group, 1)
    once = np.exp(scores - expected_lse[..., None]) @ values
    c0, c1, _ = coeffs.T[:, None, :, None, None]
    np.testing.assert_allclose(out, c0 * values + c1 * once, rtol=0, atol=1e-12)
    if keeps:
        np.testing.assert_allclose(u, once, rtol=0, atol=1e-12)
        np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=1e-12)
    else:
        assert np.isnan(u).all()
        np.testing.assert_allclose(lse[..., :n], expected_lse / np.log(2), rtol=0, atol=1e-12)
        assert np.isinf(lse[..., n:]).all()
