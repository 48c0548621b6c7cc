"""The Hopper gradients without a GPU: their arithmetic, and what their barriers wait for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from gfsa.kernels import hopper
from gfsa.kernels.launching import KEY_MASK, NO_MASK, SPANS, Options, Problem
from gfsa.operators import Visibility
from gfsa.operators.dense import DenseOperator
from support import gluon_on_cpu
from support.gluon_on_cpu import Descriptor, Number, Numbers, Pointer
from support.packed_cases import packed

DIM, SCALE = 16, 0.3
CPU = torch.device("cpu")
# rows and columns of the tiles of each kernel, as at head dims of 64 and of 128 but smaller
TILES = {
    64: {"grad_first_pass": (16, 16), "grad_keys": (16, 16), "grad_queries": (16, 16)},
    128: {"grad_first_pass": (16, 16), "grad_keys": (32, 16), "grad_queries": (32, 16)},
}


@pytest.fixture(autouse=True)
def _several_groups_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "HEADS_AT_A_TIME", {64: 2, 128: 3})


@pytest.fixture
def kernels() -> Iterator[dict[str, Any]]:
    with gluon_on_cpu.on_cpu("gfsa.kernels.gluon_short", "gfsa.kernels.gluon_hopper") as modules:
        yield vars(modules[-1])


class Drawn(NamedTuple):
    """Random tokens, and what the specification gives for them: dq, dk and dv by query head, dc."""

    # q, k, v, g, the output and the coefficients, float64; in place of the output of a filter with
    # the exclusive term A·V, which its gradient reads
    tokens: list[np.ndarray]
    matrix: torch.Tensor
    # natural ones, infinite for a query that sees no key
    lse: torch.Tensor
    expected: tuple[torch.Tensor, ...]


def drawn(
    shape: tuple[int, int, int, int],
    visible: Visibility,
    degree: int,
    exclusive: bool = False,
    dim: int = DIM,
    room: int = DIM,
) -> Drawn:
    """
    Args:
        shape: batch, heads, heads that share keys, tokens.
        dim: features of a head that are used; room: features on chip, zeros from ``dim`` on.
    """
    batch, heads, group, n = shape
    generator = torch.Generator().manual_seed(n)

    def tokens(number: int) -> torch.Tensor:
        size = (batch, number, n, room)
        x = torch.randn(size, generator=generator, dtype=torch.float64)
        # as the copy engine fills what is beyond the last feature
        return x * (torch.arange(room) < dim)

    q, k, v, g = (tokens(number) for number in (heads, heads // group, heads // group, heads))
    if degree == 1:
        # a token without a direction of its own
        v[0, 0, n // 2] = 0.0
    # and shares, where there is an exclusive term
    coeffs = torch.randn(heads, degree + 1 + exclusive, generator=generator, dtype=torch.float64)
    exact = [q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), coeffs]
    exact = [x.requires_grad_() for x in exact]
    seen = visible.rows(0, n, n, CPU)
    scores = (SCALE * exact[0] @ exact[1].mT).masked_fill(~seen, -torch.inf)
    # a query that sees no key, as left padding leaves some: its row of the matrix is zero
    empty = ~seen.any(-1, keepdim=True)
    matrix = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    operator, c = DenseOperator(matrix), exact[3]
    share = c[:, degree + 1] if exclusive else None
    out = operator.polynomial(c[:, : degree + 1], exact[2], share)
    expected = torch.autograd.grad(out, exact, g)
    read = operator.apply(exact[2]) if exclusive else out
    lse = scores.logsumexp(-1).masked_fill(empty[..., 0], torch.inf).detach()
    given = [x.detach().numpy() for x in (q, k, v, g, read, coeffs)]
    return Drawn(given, matrix.detach(), lse, expected)


def run(
    kernels: dict[str, Any],
    shape: tuple[int, int, int, int],
    visible: Visibility,
    width: int,
    dim: int = DIM,
    room: int = DIM,
    with_queries: bool = False,
) -> list[tuple[np.ndarray, torch.Tensor]]:
    """What the kernels of degree 2 give and what the specification gives.

    Args:
        width: of a head on chip, which decides about the tiles and the order of the grid.
        with_queries: dQ is added up by the kernel of dK and dV.
    """
    batch, heads, group, n = shape
    (q_, k_, v_, g_, out_, c), matrix, lses, expected = drawn(shape, visible, 2, False, dim, room)
    kind, mask, strides = NO_MASK, np.zeros(0, dtype=int), (0, 0, 0)
    if visible.keys is not None:
        # with causality or without it
        kind, mask, strides = KEY_MASK, visible.keys.numpy().astype(int), (n, 0, 1)
    elif visible.needs_rows():
        kind, mask = SPANS, visible.spans(n, CPU).numpy().astype(int)
        strides = (2 * n if len(mask) > 1 else 0, 0, 0)
    options = Options(SCALE, visible.causal)
    sizes = (batch, heads, heads // group, n, dim)
    problem = Problem(*sizes, torch.bfloat16, None, options, (strides[0], 0, 0, 0), kind)

    u = matrix.numpy() @ v_.repeat(group, 1)
    lse = lses.numpy()[:, :, None]
    delta = np.full(lse.shape, np.nan)
    du, gq, gk, gv = (np.full(q_.shape, np.nan) for _ in range(4))
    numbers = (Number(heads), Number(group), Number(n), SCALE, *map(Number, strides))
    grids = {name: hopper.grid_of(problem, rows, width) for name, (rows, _) in TILES[width].items()}
    parts = np.full((heads, 3, np.prod(grids["grad_first_pass"]) // heads), np.nan)
    wide = TILES[width]["grad_keys"][1]
    tiles = -(-n // wide)
    sums = np.zeros((batch, heads, tiles, wide, room))
    pointers = {"delta": delta, "lse": lse, "dc": parts, "coeffs": c, "mask": mask, "sums": sums}

    def launch(
        name: str,
        cols: Sequence[np.ndarray],
        rows: Sequence[np.ndarray],
        names: str,
        *constants: bool,
    ) -> None:
        high, wide = TILES[width][name]
        gluon_on_cpu.launch(
            kernels[name],
            grids[name],
            *((Numbers if x.shape[2] == 1 else Descriptor)(x, wide) for x in cols),
            *(Descriptor(x, high) for x in rows),
            *(Pointer(pointers[x].reshape(-1)) for x in names.split()),
            *numbers,
            *(room, high, wide, visible.causal, used, kind, *constants),
        )

    used = room if room == DIM else hopper.used(dim)
    first_rows = (k_, g_, v_, u, out_, du)
    launch("grad_first_pass", (q_, g_, lse), first_rows, "delta dc coeffs mask")
    keys_rows = (k_, v_, u, g_, gk, gv)
    keys_cols = (q_, g_, du, lse, delta)
    launch("grad_keys", keys_cols, keys_rows, "coeffs mask sums", with_queries)
    if with_queries:
        finish, memory = kernels["finish_queries"], Pointer(sums.reshape(-1))
        numbers = (Number(heads), SCALE)
        grid = (tiles, batch * heads)
        gluon_on_cpu.launch(finish, grid, Descriptor(gq, wide), memory, *numbers, room, wide)
    else:
        launch("grad_queries", (k_, v_, u), (q_, g_, du, gq), "delta lse coeffs mask")
    return list(zip((gq, gk, gv, parts.sum(-1)), expected, strict=True))


def padded(lengths: Sequence[int], causal: bool = False) -> Visibility:
    """Tokens of which so many take part, the first ones of a row or, if negative, the last ones."""
    tokens = max(map(abs, lengths))
    numbers = torch.arange(tokens)
    rows = [numbers < x if x > 0 else numbers >= tokens + x for x in lengths]
    return Visibility(torch.stack(rows)[:, None], causal=causal)


def check(found: list[tuple[np.ndarray, torch.Tensor]]) -> None:
    for got, expected in found:
        np.testing.assert_allclose(got, expected.numpy(), rtol=0, atol=1e-11)


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(
    # batch, heads, heads that share keys, tokens; what they see
    ("shape", "visible"),
    [
        ((1, 2, 2, 64), Visibility(causal=True)),
        # the last block is not full
        ((2, 1, 1, 76), Visibility()),
        ((2, 2, 1, 40), padded([40, 23])),
        # a decoder's padding, on the right and on the left: the first queries see nothing there
        ((2, 2, 2, 40), padded([40, 23], causal=True)),
        ((3, 1, 1, 52), padded([-52, -31, -3], causal=True)),
        # documents that begin with tiles, inside of them, several in one, and of one token
        ((2, 2, 2, 84), packed([32, 20, 1, 1, 30], [84])),
        ((1, 3, 1, 52), packed([1] * 20 + [32])),
        ((1, 1, 1, 100), packed([70, 10, 20], window=18)),
        # windows: of one token, over several tiles, longer than all tokens
        ((1, 2, 1, 52), Visibility(causal=True, window=1)),
        ((1, 2, 1, 76), Visibility(causal=True, window=33)),
        ((2, 1, 1, 40), Visibility(causal=True, window=400)),
        ((1, 1, 1, 4), Visibility(causal=True, window=2)),
    ],
)
def test_gradients(
    kernels: dict[str, Any], shape: tuple[int, int, int, int], visible: Visibility, width: int
) -> None:
    check(run(kernels, shape, visible, width))


@pytest.mark.parametrize("dim", [72, 80, 96, 120])
def test_features_that_products_leave_out(kernels: dict[str, Any], dim: int) -> None:
    """A head has room for 128 features; scores are products of the first 80 or 96, or of all."""
    causal = (packed([20, 1, 31]), Visibility(causal=True), padded([-52, -31], causal=True))
    for visible in (*causal, Visibility(), padded([52, 9])):
        batch = 1 if visible.keys is None else len(visible.keys)
        check(run(kernels, (batch, 2, 1, 52), visible, 128, dim, 128))


@pytest.mark.parametrize(
    # batch, heads, heads that share keys, tokens
    ("shape", "causal"),
    [
        ((2, 2, 2, 160), True),
        # the last block is not full; five heads are no groups of three
        ((1, 5, 1, 76), True),
        ((1, 1, 1, 4), True),
        # without a mask whole blocks of keys
        ((1, 2, 1, 96), False),
    ],
)
def test_dq_added_up_with_dk_and_dv(
    kernels: dict[str, Any], shape: tuple[int, int, int, int], causal: bool
) -> None:
    check(run(kernels, shape, Visibility(causal=causal), 128, with_queries=True))


def run_once(
    kernels: dict[str, Any],
    shape: tuple[int, int, int, int],
    visible: Visibility,
    rows: int,
    cols: int,
    powers: int,
    exclusive: bool = False,
    dim: int = DIM,
    room: int = DIM,
    with_sums: bool = True,
) -> list[tuple[np.ndarray, torch.Tensor]]:
    """What the kernels of degree 1 give and what the specification gives."""
    batch, heads, group, n = shape
    sums = 2 + exclusive
    (q_, k_, v_, g_, mixed_, c), _, lses, expected = drawn(shape, visible, 1, exclusive, dim, room)
    used = room if room == DIM else hopper.used(dim)
    # logsumexps to base 2, infinite beyond the last query
    length = (n + 15) // 16 * 16
    lse = np.full((batch, heads, 1, length), np.inf)
    lse[..., 0, :n] = lses.numpy() / np.log(2)
    delta = np.full(lse.shape, np.nan)
    gq, gk, gv = (np.full((batch, heads, n, room), np.nan) for _ in range(3))
    blocks = -(-n // rows)
    parts = np.full((heads, sums, batch * blocks), np.nan)
    padded = np.full((heads, powers), np.nan)
    padded[:, :2] = c[:, :2]
    share = c[:, 2:].copy()
    du = np.full(g_.shape, np.nan) if exclusive else g_
    spans, kind = np.zeros(0, dtype=int), NO_MASK
    if visible.needs_rows():
        spans, kind = visible.spans(n, CPU).numpy().astype(int), SPANS
    stride = Number(2 * n if len(spans) > 1 else 0)
    numbers = (Number(heads), Number(group), Number(n), SCALE, stride)
    constants = (room, rows, cols, visible.causal, used, powers, kind, exclusive)
    gluon_on_cpu.launch(
        kernels["grad_queries_one"],
        (blocks, batch * heads),
        *(Descriptor(x, cols) for x in (k_, v_)),
        *(Descriptor(x, rows) for x in (q_, g_, v_, mixed_, gq, du)),
        *(Pointer(x.reshape(-1)) for x in (delta, lse, padded, share, spans)),
        *numbers,
        *constants,
    )
    assert (delta[..., n:] == 0).all()
    gluon_on_cpu.launch(
        kernels["grad_keys_one"],
        (blocks, batch * heads),
        *(Descriptor(x, cols) for x in (q_, du)),
        *(Numbers(x, cols) for x in (lse, delta)),
        *(Descriptor(x, rows) for x in (k_, v_, g_, mixed_, gk, gv)),
        *(Pointer(x.reshape(-1)) for x in (parts, padded, share, spans)),
        *numbers,
        *constants,
        with_sums,
    )
    assert with_sums or np.isnan(parts).all()
    return list(zip((gq, gk, gv, *[parts.sum(-1)][:with_sums]), expected, strict=False))


@pytest.mark.parametrize(
    # heads, group, tokens, rows and columns of tiles; what they see
    ("shape", "tile", "visible"),
    [
        *(
            (shape, tile, Visibility(causal=causal))
            for causal in (False, True)
            for shape, tile in [
                ((2, 2, 64), 16),
                # the last block is not full, nor are the last 16 logsumexps
                ((1, 1, 75), 16),
                ((1, 1, 75), 32),
                # fewer tokens than a tile has rows
                ((2, 1, 5), 32),
            ]
        ),
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
@pytest.mark.parametrize("exclusive", [False, True])
def test_gradients_of_degree_one(
    kernels: dict[str, Any],
    shape: tuple[int, int, int],
    tile: int,
    visible: Visibility,
    exclusive: bool,
) -> None:
    """Coefficients have a third column if they were made for both degrees."""
    batch = 1 if visible.documents is None else len(visible.documents)
    powers = 3 if visible.needs_rows() else 2
    check(run_once(kernels, (batch, *shape), visible, tile, tile, powers, exclusive))


@pytest.mark.parametrize("dim", [80, 96])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("exclusive", [False, True])
def test_features_that_degree_one_leaves_out(
    kernels: dict[str, Any], dim: int, causal: bool, exclusive: bool
) -> None:
    """... and gradients of coefficients that are not wanted."""
    shape, visible = (1, 2, 2, 75), Visibility(causal=causal)
    check(run_once(kernels, shape, visible, 16, 16, 2, exclusive, dim, 128, with_sums=False))


def test_no_tile_of_another_document_is_read(
    kernels: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = gluon_on_cpu.moved_tiles(monkeypatch)
    run_once(kernels, (1, 2, 2, 96), packed([32, 48, 16]), 16, 16, 3)
    heads, blocks, seen = 2, 6, (1 + 2) + (1 + 2 + 3) + 1
    # keys and values: those that a block of queries sees, its own values, and a block's own
    assert taken.count(1) == heads * (2 * seen + blocks + 2 * blocks)
    # q, g, the output and dQ of a block of queries; q and g that a block of keys is seen by, its g,
    # dK and dV
    assert taken.count(2) == heads * (4 * blocks + 2 * seen + 3 * blocks)
