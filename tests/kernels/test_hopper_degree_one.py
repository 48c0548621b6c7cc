"""The Hopper gradient of degree 1 without a GPU: its arithmetic, and what its barriers wait for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from gfsa.kernels.launching import NO_MASK, SPANS
from gfsa.operators import AttentionCall, DenseOperator, Visibility
from support import gluon_on_cpu
from support.gluon_on_cpu import Descriptor, Number, Numbers, Pointer
from support.packed_cases import packed

ROOM = "gfsa.kernels"
DIM, SCALE = 16, 0.3


@pytest.fixture
def kernels() -> Iterator[Any]:
    names = ("gluon_short", "gluon_hopper")
    with gluon_on_cpu.on_cpu(*(f"{ROOM}.{name}" for name in names)) as modules:
        yield modules[-1]


def run(
    kernels: Any,
    shape: tuple[int, int, int, int],
    causal: bool,
    rows: int,
    cols: int,
    powers: int,
    visible: Visibility | None = None,
    exclusive: bool = False,
) -> list[tuple[np.ndarray, torch.Tensor]]:
    """What the kernels give and what the specification gives: dq, dk and dv by query head, dc.

    Args:
        visible: documents and windows, under a causal mask.
    """
    batch, heads, group, n = shape
    generator = torch.Generator().manual_seed(n)

    def tokens(number: int) -> torch.Tensor:
        size = (batch, number, n, DIM)
        return torch.randn(size, generator=generator, dtype=torch.float64)

    q, k, v, g = (tokens(number) for number in (heads, heads // group, heads // group, heads))
    # a token without a direction of its own
    v[0, 0, n // 2] = 0.0
    sums = 3 if exclusive else 2
    coeffs = torch.randn(heads, sums, generator=generator, dtype=torch.float64)
    exact = [q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), coeffs]
    exact = [x.requires_grad_() for x in exact]
    seen = Visibility(causal=causal) if visible is None else visible
    operator = DenseOperator.from_call(AttentionCall(*exact[:2], scale=SCALE, visible=seen))
    share = exact[3][:, 2] if exclusive else None
    out = operator.polynomial(exact[3][:, :2], exact[2], share)
    expected = torch.autograd.grad(out, exact, g)
    # what is saved for the gradient
    mixed = operator.apply(exact[2]) if exclusive else out

    # logsumexps to base 2, infinite beyond the last query
    scores = SCALE * exact[0] @ exact[1].mT
    scores = scores.masked_fill(~seen.rows(0, n, n, q.device), -torch.inf)
    length = (n + 15) // 16 * 16
    lse = np.full((batch, heads, 1, length), np.inf)
    lse[..., 0, :n] = (scores.logsumexp(-1) / np.log(2)).detach().numpy()
    delta = np.full(lse.shape, np.nan)
    gq, gk, gv = (np.full((batch, heads, n, DIM), np.nan) for _ in range(3))
    blocks = -(-n // rows)
    parts = np.full((heads, sums, batch * blocks), np.nan)
    padded = np.full((heads, powers), np.nan)
    padded[:, :sums] = coeffs.detach().numpy()
    tensors = [x.detach().numpy() for x in (q, k, v, g, mixed)]
    q_, k_, v_, g_, mixed_ = tensors
    du = np.full(g_.shape, np.nan) if exclusive else g_
    spans, kind = np.zeros(0, dtype=int), NO_MASK
    if visible is not None:
        spans, kind = visible.spans(n, q.device).numpy().astype(int), SPANS
    stride = Number(2 * n if len(spans) > 1 else 0)
    numbers = (Number(heads), Number(group), Number(n), SCALE, stride)
    constants = (DIM, rows, cols, causal, powers, kind, exclusive)
    gluon_on_cpu.launch(
        kernels.grad_queries_one,
        (blocks, batch * heads),
        *(Descriptor(x, cols) for x in (k_, v_)),
        *(Descriptor(x, rows) for x in (q_, g_, v_, mixed_, gq, du)),
        *(Pointer(x.reshape(-1)) for x in (delta, lse, padded, spans)),
        *numbers,
        *constants,
    )
    assert (delta[..., n:] == 0).all()
    gluon_on_cpu.launch(
        kernels.grad_keys_one,
        (blocks, batch * heads),
        *(Descriptor(x, cols) for x in (q_, du)),
        *(Numbers(x, cols) for x in (lse, delta)),
        *(Descriptor(x, rows) for x in (k_, v_, g_, mixed_, gk, gv)),
        *(Pointer(x.reshape(-1)) for x in (parts, padded, spans)),
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


@pytest.mark.parametrize(
    ("shape", "causal", "visible"),
    [
        ((2, 2, 1, 75), False, None),
        ((1, 4, 2, 64), True, None),
        ((2, 2, 2, 75), True, packed([16, 20, 1, 1, 30, 7], [75])),
    ],
)
def test_the_exclusive_term(
    kernels: Any, shape: tuple[int, int, int, int], causal: bool, visible: Visibility | None
) -> None:
    for got, expected in run(kernels, shape, causal, 16, 16, 3, visible, exclusive=True):
        np.testing.assert_allclose(got, expected.numpy(), rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    # heads, group, tokens, rows and columns of tiles; what they see
    ("shape", "tile", "visible"),
    [
        # documents that begin inside of blocks and between them, of one token too; heads that
        # share keys
        ((2, 2, 75), 16, packed([16, 20, 1, 1, 30, 7], [75])),
        ((1, 1, 96), 32, packed([64, 32])),
        # windows: of one token, inside of a block, over several, and as long as all tokens
        ((1, 1, 40), 16, Visibility(causal=True, window=1)),
        ((2, 1, 75), 16, Visibility(causal=True, window=9)),
        ((1, 1, 100), 16, Visibility(causal=True, window=37)),
        ((1, 1, 40), 32, Visibility(causal=True, window=40)),
        ((2, 2, 90), 16, packed([50, 3, 37], [20, 20, 50], window=21)),
    ],
)
def test_documents_and_windows(
    kernels: Any, shape: tuple[int, int, int], tile: int, visible: Visibility
) -> None:
    batch = 1 if visible.documents is None else len(visible.documents)
    for got, expected in run(kernels, (batch, *shape), True, tile, tile, 3, visible):
        np.testing.assert_allclose(got, expected.numpy(), rtol=0, atol=1e-11)


def test_no_tile_of_another_document_is_read(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = gluon_on_cpu.moved_tiles(monkeypatch)
    run(kernels, (1, 2, 2, 96), True, 16, 16, 3, packed([32, 48, 16]))
    heads, blocks, seen = 2, 6, (1 + 2) + (1 + 2 + 3) + 1
    # keys and values: those that a block of queries sees, its own values, and a block's own
    assert taken.count(1) == heads * (2 * seen + blocks + 2 * blocks)
    # q, g, the output and dQ of a block of queries; q and g that a block of keys is seen by, its g,
    # dK and dV
    assert taken.count(2) == heads * (4 * blocks + 2 * seen + 3 * blocks)


def test_coefficients_of_a_filter_have_three_columns(kernels: Any) -> None:
    for got, expected in run(kernels, (1, 2, 1, 20), True, 16, 16, powers=3):
        np.testing.assert_allclose(got, expected.numpy(), rtol=0, atol=1e-11)
