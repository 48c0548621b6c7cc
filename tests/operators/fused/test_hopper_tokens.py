"""dQ, dK and dV from one kernel without a GPU: its arithmetic, and that it takes every block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

from support import gluon_on_cpu
from support.gluon_on_cpu import Descriptor, Number, NumberDescriptor, Pointer

FUSED = "gfsa.operators.fused"
# keys of a block, queries of a tile, features
BM, BN, D = 32, 16, 32


@pytest.fixture
def kernels() -> Iterator[Any]:
    """The kernel's module, last of those that it imports."""
    names = ("short.tiles", "sweep.order", *(f"hopper.{x}" for x in ("tiles", "keys", "sums")))
    with gluon_on_cpu.on_cpu(*(f"{FUSED}.{x}" for x in (*names, "hopper.tokens"))) as modules:
        yield modules[-1]


def run(
    kernels: Any, heads: int, group: int, n: int, span: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """What the kernel gives and what it should: dQ, dK and dV of each query head."""
    draw = np.random.default_rng(n)
    scale, shape = 0.3, (2, heads, n, D)
    q, g = draw.normal(size=(2, *shape))
    k, v = draw.normal(size=(2, 2, heads // group, n, D))
    coeffs = draw.normal(size=(heads, 3))
    keys, values = k.repeat(group, 1), v.repeat(group, 1)
    scores = scale * q @ keys.swapaxes(-1, -2)
    scores[..., ~np.tri(n, dtype=bool)] = -np.inf
    lse = np.logaddexp.reduce(scores, -1)
    a = np.exp(scores - lse[..., None])
    c0, c1, c2 = coeffs.T[:, None, :, None, None]
    u = a @ values
    du = c1 * g + c2 * (a.swapaxes(-1, -2) @ g)
    da = c2 * g @ u.swapaxes(-1, -2) + du @ values.swapaxes(-1, -2)
    delta = (a * da).sum(-1)
    ds = a * (da - delta[..., None])
    expected = ds @ keys * scale, ds.swapaxes(-1, -2) @ q * scale, c0 * g + a.swapaxes(-1, -2) @ du
    dq, dk, dv = np.full((3, *shape), np.nan)
    tiles, total = -(-n // BN), 2 * heads
    sums = Pointer(np.zeros(total * tiles * BN * D))
    gluon_on_cpu.launch(
        kernels.grad_tokens,
        (-(-n // BM), total),
        *(Descriptor(x, BN) for x in (q, g, du)),
        *(NumberDescriptor(x[:, :, None], BN) for x in (lse, delta)),
        *(Descriptor(x, BM) for x in (k, v, u, g, dk, dv)),
        *(sums, Pointer(coeffs.reshape(-1))),
        *(Number(x) for x in (heads, group, n)),
        *(scale, D, BM, BN, span),
    )
    numbers = Number(heads), scale
    gluon_on_cpu.launch(
        kernels.finish_queries, (tiles, total), Descriptor(dq, BN), sums, *numbers, D, BN
    )
    return list(zip((dq, dk, dv), expected, strict=True))


@pytest.mark.parametrize(
    # heads, group, tokens, heads by turns
    "shape",
    [
        (2, 1, 160, 1),
        # heads that share keys; the last block and the last tile are not full
        (4, 2, 90, 2),
        # heads do not divide by those that take turns
        (3, 1, 100, 4),
        (1, 1, 5, 4),
    ],
)
def test_the_gradient(kernels: Any, shape: tuple[int, ...]) -> None:
    for got, expected in run(kernels, *shape):
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-11)
