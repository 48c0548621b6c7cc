"""The Hopper gradient of degree 1 without a GPU: its arithmetic, and what its barriers wait for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from gfsa.operators.dense import DenseOperator
from support import gluon_on_cpu
from support.gluon_on_cpu import Descriptor, Number, Numbers, Pointer

ROOM = "gfsa.operators.fused"
DIM, SCALE = 16, 0.3


@pytest.fixture
def kernels() -> Iterator[Any]:
    names = ("short.tiles", "hopper.tiles", "hopper.degree_one")
    with gluon_on_cpu.on_cpu(*(f"{ROOM}.{name}" for name in names)) as modules:
        yield modules[-1]


def run(
    kernels: Any, shape: tuple[int, int, int, int], causal: bool, rows: int, cols: int, powers: int
) -> list[tuple[np.ndarray, torch.Tensor]]:
    """What the kernels give and what the specification gives: dq, dk and dv by query head, dc."""
    batch, heads, group, n = shape
    generator = torch.Generator().manual_seed(n)

    def tokens(number: int) -> torch.Tensor:
        size = (batch, number, n, DIM)
        return torch.randn(size, generator=generator, dtype=torch.float64)

    q, k, v, g = (tokens(number) for number in (heads, heads // group, heads // group, heads))
    coeffs = torch.randn(heads, 2, generator=generator, dtype=torch.float64)
    exact = [q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), coeffs]
    exact = [x.requires_grad_() for x in exact]
    operator = DenseOperator.from_qk(*exact[:2], is_causal=causal, scale=SCALE)
    out = operator.polynomial(exact[3], exact[2])
    expected = torch.autograd.grad(out, exact, g)

    # logsumexps to base 2, infinite beyond the last query
    scores = SCALE * exact[0] @ exact[1].mT
    if causal:
        scores = scores.masked_fill(~torch.ones(n, n).tril().bool(), -torch.inf)
    length = (n + 15) // 16 * 16
    lse = np.full((batch, heads, 1, length), np.inf)
    lse[..., 0, :n] = (scores.logsumexp(-1) / np.log(2)).detach().numpy()
    delta = np.full(lse.shape, np.nan)
    gq, gk, gv = (np.full((batch, heads, n, DIM), np.nan) for _ in range(3))
    blocks = -(-n // rows)
    parts = np.full((heads, 2, batch * blocks), np.nan)
    padded = np.full((heads, powers), np.nan)
    padded[:, :2] = coeffs.detach().numpy()
    tensors = [x.detach().numpy() for x in (q, k, v, g, out)]
    q_, k_, v_, g_, out_ = tensors
    numbers = (Number(heads), Number(group), Number(n), SCALE)
    constants = (DIM, rows, cols, causal, powers)
    gluon_on_cpu.launch(
        kernels.grad_queries_one,
        (blocks, batch * heads),
        *(Descriptor(x, cols) for x in (k_, v_)),
        *(Descriptor(x, rows) for x in (q_, g_, v_, out_, gq)),
        *(Pointer(x.reshape(-1)) for x in (delta, lse, padded)),
        *numbers,
        *constants,
    )
    assert (delta[..., n:] == 0).all()
    gluon_on_cpu.launch(
        kernels.grad_keys_one,
        (blocks, batch * heads),
        *(Descriptor(x, cols) for x in (q_, g_)),
        *(Numbers(x, cols) for x in (lse, delta)),
        *(Descriptor(x, rows) for x in (k_, v_, g_, gk, gv)),
        *(Pointer(x.reshape(-1)) for x in (parts, padded)),
        *numbers,
        *constants,
    )
    return list(zip((gq, gk, gv, parts.sum(-1)), expected, strict=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    # (batch, heads, group, tokens), rows and columns of tiles
    ("shape", "tiles"),
    [
        ((1, 2, 2, 64), (16, 16)),
        # the last block is not full, nor are the last 16 logsumexps
        ((2, 1, 1, 75), (16, 16)),
        ((1, 1, 1, 75), (32, 32)),
        # fewer tokens than a tile has rows
        ((1, 2, 1, 5), (32, 32)),
    ],
)
def test_gradients(
    kernels: Any, shape: tuple[int, int, int, int], tiles: tuple[int, int], causal: bool
) -> None:
    for got, expected in run(kernels, shape, causal, *tiles, powers=2):
        np.testing.assert_allclose(got, expected.numpy(), rtol=0, atol=1e-11)


def test_coefficients_of_a_filter_have_three_columns(kernels: Any) -> None:
    for got, expected in run(kernels, (1, 2, 1, 20), True, 16, 16, powers=3):
        np.testing.assert_allclose(got, expected.numpy(), rtol=0, atol=1e-11)
