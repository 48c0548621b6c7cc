"""One sweep of degree 1 and 2 without a GPU: its arithmetic, and what waits for what."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from gfsa.kernels import sweep
from gfsa.kernels.launching import NO_MASK, SPANS
from gfsa.operators import Visibility
from support import gluon_on_cpu
from support.gluon_on_cpu import Descriptor, Number, Pointer
from support.packed_cases import packed
from support.sweep_plan import plan_of

ROOM = "gfsa.kernels"


@pytest.fixture
def kernels() -> Iterator[Any]:
    with gluon_on_cpu.on_cpu(f"{ROOM}.gluon_short", f"{ROOM}.gluon_sweep") as modules:
        yield modules[-1]


class Variant(NamedTuple):
    """What the kernel is compiled for.

    Args:
        stages: tiles on the chip at a time; keeps: A·V of degree 1, which degree 2 always keeps.
        draws: whether programs draw their blocks from a counter.
        dim: features of a head that are used; room: features on chip.
    """

    degree: int
    tile: int
    stages: int
    keeps: bool = True
    exclusive: bool = False
    causal: bool = True
    draws: bool = True
    dim: int = 16
    room: int = 16


def run(
    kernels: Any,
    shape: tuple[int, ...],
    variant: Variant,
    visible: Visibility | None = None,
    at_once: int | None = None,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """What the kernel gives and what it should: the output, logsumexps, and U if it is kept.

    Args:
        shape: batch, heads, heads that share keys, tokens, heads at a time, programs.
        visible: documents and windows; a causal mask or none by default.
        at_once: programs that run at a time, all by default.
    """
    batch, heads, group, n, span, programs = shape
    degree, tile, stages, keeps, exclusive, causal, draws, used, dim = variant
    draw = np.random.default_rng(n)
    scale, cpu = 0.3, torch.device("cpu")
    # zeros beyond the last feature, as the copy engine fills them
    there = np.arange(dim) < used
    q = draw.normal(size=(batch, heads, n, dim)) * there
    k, v = draw.normal(size=(2, batch, heads // group, n, dim)) * there
    # a token without a direction of its own
    v[0, 0, n // 2] = 0.0
    coeffs, share = draw.normal(size=(heads, degree + 1)), draw.normal(size=heads)
    u, out = (np.full(q.shape, np.nan) for _ in range(2))
    # with degree 1 a multiple of 16 for each head
    room = n if degree == 2 else (n + 15) // 16 * 16
    lse = np.full((batch, heads, room), np.nan)
    total, blocks = batch * heads, -(-n // sweep.ROWS)
    spans, kind = np.zeros(0, dtype=int), NO_MASK
    if visible is not None:
        spans, kind = visible.spans(n, cpu).numpy().astype(int), SPANS
    stride = 2 * n if len(spans) > 1 else 0
    # degree 2 does not write its output by the copy engine, nor degree 1 by its address
    moved, written, flags = (u, u), (out, u), flags_of(batch, total, blocks, spans, n, tile)
    strides = (heads * n * dim, n * dim, dim)
    if degree == 1:
        moved, written, strides = (u, out), (np.zeros(1), np.zeros(1)), (0, 0, 0)
        flags = np.zeros(int(draws), dtype=int)
    copied = sweep.HALF if degree == 2 else tile
    sizes = (total, heads, group, n, scale, blocks, span, *strides, stride)
    gluon_on_cpu.launch(
        kernels.filter_sweep,
        programs,
        Descriptor(q, sweep.HALF),
        *(Descriptor(x, copied) for x in (k, v)),
        *(Descriptor(x, sweep.HALF) for x in moved),
        *(Pointer(x.reshape(-1)) for x in (*written, lse, coeffs, share, flags, spans)),
        *(Number(x) if isinstance(x, int) else x for x in sizes),
        *(dim, used, tile, stages, kind, causal, draws, degree, degree + 1, keeps, exclusive),
        at_once=at_once,
    )
    assert visible is not None or degree == 1 or flags[: total * blocks * 2].all()
    scores = scale * q @ k.repeat(group, 1).swapaxes(-1, -2)
    seen = (visible or Visibility(causal=causal)).rows(0, n, n, cpu).numpy()
    scores[np.broadcast_to(~seen, scores.shape)] = -np.inf
    expected_lse = np.logaddexp.reduce(scores, -1)
    a = np.exp(scores - expected_lse[..., None])
    values = v.repeat(group, 1)
    once = a @ values
    c0, c1, *c2 = coeffs.T[:, None, :, None, None]
    expected = c0 * values + c1 * once
    if degree == 2:
        expected += c2[0] * (a @ once)
    else:
        assert np.isinf(lse[..., n:]).all()
        assert keeps or np.isnan(u).all()
        expected_lse = expected_lse / np.log(2)
    if exclusive:
        squares = (values**2).sum(-1, keepdims=True)
        along = (once * values).sum(-1, keepdims=True) / np.where(squares > 0, squares, 1)
        expected -= share[:, None, None] * along * values
    kept = [(u, once)] if keeps else []
    return [(out, expected), (lse[..., :n], expected_lse), *kept]


def flags_of(
    batch: int, total: int, blocks: int, spans: np.ndarray, n: int, tile: int
) -> np.ndarray:
    """What degree 2 finds before it begins: flags that are zero, and the plan of spans."""
    numbers = total * blocks * 2 + sweep.POLLED
    flags = np.zeros(numbers + batch * sweep.planned(blocks), dtype=int)
    if len(spans):
        rows = np.broadcast_to(spans, (batch, 2, n))
        plans = [plan_of(row, tile // sweep.HALF).reshape(-1) for row in rows]
        planned = np.concatenate(plans)
        flags[numbers : numbers + len(planned)] = planned
    return flags


def check(*given: Any, **options: Any) -> None:
    for got, expected in run(*given, **options):
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)


# degree 2 with as many tiles on the chip as on a GPU, and fewer, which are waited for more often
VARIANTS = [
    *(Variant(2, tile, stages) for tile in (64, 128) for stages in (2, sweep.STAGES[2])),
    *(
        Variant(1, tile, sweep.STAGES[1], keeps=keeps)
        for tile in (64, 128)
        for keeps in (False, True)
    ),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
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
def test_the_filter(kernels: Any, shape: tuple[int, ...], variant: Variant) -> None:
    check(kernels, shape, variant)


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("visible", [None, packed([130, 70, 100])])
def test_the_exclusive_term(
    kernels: Any, visible: Visibility | None, keeps: bool, draws: bool
) -> None:
    variant = Variant(1, 128, sweep.STAGES[1], keeps, exclusive=True, draws=draws)
    check(kernels, (1, 4, 2, 300, 4, 3), variant, visible)


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        # whole tiles, and heads that share keys
        (2, 4, 2, 256, 2, 3),
        # the last tile is not full; more programs than blocks
        (1, 3, 1, 300, 1, 20),
        # one tile; a second warpgroup without queries; one program
        (2, 2, 1, 50, 1, 1),
        (1, 1, 1, 1, 1, 2),
    ],
)
def test_without_causality(
    kernels: Any, shape: tuple[int, ...], causal: bool, draws: bool, exclusive: bool
) -> None:
    """... and without a counter, whatever the order of the blocks."""
    check(kernels, shape, Variant(1, 128, sweep.STAGES[1], exclusive, exclusive, causal, draws))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [80, 96])
def test_features_that_products_leave_out(kernels: Any, dim: int, causal: bool) -> None:
    variant = Variant(1, 128, sweep.STAGES[1], True, True, causal, causal, dim, 128)
    check(kernels, (1, 2, 2, 300, 2, 3), variant)


@pytest.mark.parametrize("variant", [each for each in VARIANTS if each.keeps], ids=str)
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
        ((1, 1, 550, 1, 2), packed([300, 220, 30])),
        # edges in both halves of a row, and blocks that are cut short; one program, and many
        ((2, 1, 900, 2, 1), packed([50, 200, 140, 3, 300, 200, 7])),
        ((2, 2, 900, 1, 7), packed([200, 133, 129, 250, 128, 60], [10, 890])),
        # windows: in the diagonal, over several tiles, and as long as all tokens
        ((2, 1, 400, 2, 4), Visibility(causal=True, window=1)),
        ((2, 1, 640, 2, 3), Visibility(causal=True, window=70)),
        ((2, 2, 640, 2, 4), Visibility(causal=True, window=200)),
        ((1, 1, 300, 1, 2), Visibility(causal=True, window=300)),
        ((1, 1, 600, 1, 3), packed([333, 150, 117], window=140)),
        ((1, 1, 1, 1, 1), packed([1])),
    ],
)
def test_documents_and_windows(
    kernels: Any, shape: tuple[int, ...], visible: Visibility, variant: Variant
) -> None:
    batch = 1 if visible.documents is None else len(visible.documents)
    check(kernels, (batch, *shape), variant, visible)


ON_A_GPU = [Variant(2, 64, 3), Variant(2, 128, 3), Variant(1, 128, 2)]


@pytest.mark.parametrize("variant", ON_A_GPU, ids=str)
@pytest.mark.parametrize("numbers", [[5] * 300 + [0] * 300, [3] * 100 + [1] * 250 + [2] * 250])
def test_it_ends_if_documents_are_out_of_order(
    kernels: Any, numbers: list[int], variant: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they see is the caller's mistake; a GPU that waits forever would be worse."""
    monkeypatch.setattr(gluon_on_cpu, "PATIENCE", 5.0)
    documents = torch.tensor(numbers)[None]
    visible = Visibility(causal=True, documents=documents, in_order=True)
    for got, _ in run(kernels, (1, 1, 1, 600, 1, 2), variant, visible):
        assert np.isfinite(got).all()


@pytest.mark.parametrize(("tile", "tiles"), [(64, 2 + 4 + 2 + 2), (128, 1 + 2 + 1 + 1)])
def test_no_tile_of_another_document_is_read(
    kernels: Any, tile: int, tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = gluon_on_cpu.moved_tiles(monkeypatch)
    check(kernels, (1, 2, 2, 512, 2, 2), Variant(1, tile, 2, False), packed([256, 128, 128]))
    # of keys and of values, which both query heads share
    assert taken.count(1) == 2 * 2 * tiles


@pytest.mark.parametrize("at_once", [1, 3])
@pytest.mark.parametrize(("degree", "span"), [(2, 1), (2, 2), (2, 128), (1, 2)])
@pytest.mark.parametrize("visible", [None, packed([300, 1, 1, 348], [50] * 13, window=400)])
def test_more_programs_than_a_gpu_holds(
    kernels: Any, visible: Visibility | None, degree: int, span: int, at_once: int
) -> None:
    """Those that begin when others end are waited for by none; here there is one for each block."""
    variant = Variant(degree, 128, sweep.STAGES[degree])
    check(kernels, (2, 2, 2, 650, span, 24), variant, visible, at_once)


def test_programs_that_wait_for_later_ones_are_noticed(
    kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """High rows first: a block would need those of programs that have not begun."""
    place = kernels.place

    def from_the_end(item: Number, total: Number, blocks: Number, span: Number) -> Any:
        return place(total * blocks - 1 - item, total, blocks, span)

    monkeypatch.setattr(kernels, "place", from_the_end)
    monkeypatch.setattr(gluon_on_cpu, "PATIENCE", 0.5)
    with pytest.raises(gluon_on_cpu.DeadlockError):
        run(kernels, (1, 1, 1, 600, 1, 5), ON_A_GPU[1], at_once=2)


def test_it_waits_for_u(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without flags a block would load what no program has stored yet."""
    monkeypatch.setattr(kernels, "first_missing", lambda flags, known: known + 32)
    monkeypatch.setattr(gluon_on_cpu, "PATIENCE", 0.5)
    with pytest.raises(AssertionError, match="before it was stored"):
        run(kernels, (1, 1, 1, 600, 1, 5), ON_A_GPU[1])


def test_each_item_once(kernels: Any) -> None:
    """Items of low numbers are the low rows of the heads that are worked on together."""
    places = [kernels.place(Number(i), Number(7), Number(3), Number(4)) for i in range(21)]
    assert len(set(places)) == 21
    assert places[:5] == [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1)]
    # the three heads that are left
    assert places[12:16] == [(4, 0), (5, 0), (6, 0), (4, 1)]
