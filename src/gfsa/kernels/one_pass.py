r"""Degree 1 in one pass: ``out = c0·V + c1·A·V``, its kernels and their launches.

``A·V`` is neither written nor saved: what the filter adds is on chip already. In tensors of V's
size the kernel moves 4, as attention does; around torch's attention the same filter moves more
(``degree_one.py``).

The exclusive term, the share in a third column of the coefficients, is part of both kernels; its
formulas are in ``degree_one.py``. Its gradient needs ``A·V``, which is then written and saved in
place of the output.

**The forward** is the kernel of this file, or one causal sweep (``gluon_sweep_once.py``).
Logsumexps are to base 2. Each head has a multiple of 16 of them, so that the copy engine can read
them; queries beyond the last one have an infinite logsumexp. Scales are positive. A program's own
rows are read by their addresses, ``…_in`` with strides, and a row of UNITS times 16 bytes: the copy
engine's loads outside of a loop would wait for one another.

**The gradient** is that of ``gluon_hopper_once.py``. For wide heads of long causal rows it is
cuDNN's, whose five products, and what is done around them, take less time than seven of own
kernels:

.. math::
    dU = c_1 g, \qquad (dq, dk, A^\top dU) = \mathrm{attend}'(dU;\, q, k, V, U), \qquad
    dV = c_0 g + A^\top dU

One kernel before it computes dU, c0·g and the coefficients' gradients from g, U and V.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gfsa.kernels import hopper
from gfsa.kernels.degree_one import launch_gradient, own_part
from gfsa.kernels.launching import (
    LOG2E,
    Kernel,
    Launch,
    Options,
    Problem,
    Saved,
    Tiles,
    describe,
    empty_like,
    gluon_kernel,
    load_tile,
    multiprocessors,
    padded,
    pointers,
    problem_of,
    result_strides,
    store_tile,
    sum_groups,
)

JIT_OPTIONS = {
    "do_not_specialize": [
        *(f"{tensor}_{axis}" for tensor in "qv" for axis in "bhn"),
        *("heads", "blocks", "total", "together", "zero"),
    ],
    "do_not_specialize_on_alignment": ["coeffs"],
}


@triton.jit
def _own_block(blocks, total, together, LAST_FIRST: tl.constexpr):
    """This program's block of rows and its head of all ``total`` heads of the batch.

    Heads go ``together`` at a time through the same block, so that the longest blocks of a causal
    call run first and the shortest ones fill the gaps at the end.
    """
    program = tl.program_id(0)
    first = program // (blocks * together) * together
    width = tl.minimum(together, total - first)
    rest = program - first * blocks
    block = rest // width
    if LAST_FIRST:
        block = blocks - 1 - block
    return block, first + rest % width


@triton.jit
def _key_ranges(row, n, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr):
    """Keys ``0 … clear`` that a block of queries sees in full, ``clear … end`` to be masked."""
    end = n
    clear = n // BN * BN
    if CAUSAL:
        end = tl.minimum(n, row + BM)
        clear = row // BN * BN
    return clear, end


@triton.jit(**JIT_OPTIONS)
def attend_once(
    k_cols, v_cols, out_rows, u_rows, q_in, v_in, lse_out, coeffs,
    q_b, q_h, q_n, v_b, v_h, v_n,
    heads, group, n, scale, blocks, total, together, zero,
    UNITS: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    POWERS: tl.constexpr, CAUSAL: tl.constexpr, KEEPS: tl.constexpr, EXCLUSIVE: tl.constexpr,
):  # fmt: skip
    """``out = c0·V + c1·A·V`` and the logsumexp of the scores, for BM queries; KEEPS: A·V too."""
    block, bh = _own_block(blocks, total, together, CAUSAL)
    b, h = bh // heads, bh % heads
    key_head = h // group
    row = block * BM
    q = load_tile((q_in, q_b, q_h, q_n, n, UNITS), b, h, row, BM, D)
    i = row + tl.arange(0, BM)
    top = tl.full((BM,), float("-inf"), tl.float32)
    norm = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    clear, end = _key_ranges(row, n, BM, BN, CAUSAL)
    top, norm, acc = _attend_range(
        top, norm, acc, q, k_cols, v_cols, b, key_head, i, n, 0, clear,
        scale, D, BN, STAGES, CAUSAL, False,
    )  # fmt: skip
    top, norm, acc = _attend_range(
        top, norm, acc, q, k_cols, v_cols, b, key_head, i, n, clear, end,
        scale, D, BN, STAGES, CAUSAL, True,
    )  # fmt: skip
    # a row without keys: its map is zero, and an infinite logsumexp makes it so in the gradient
    empty = (norm == 0.0) | (i >= n)
    norm = tl.where(empty, 1.0, norm)
    lse = tl.where(empty, float("inf"), top + tl.log2(norm))
    length = (n + 15) // 16 * 16
    tl.store(lse_out + bh.to(tl.int64) * length + i, lse, mask=i < length)
    c0 = tl.load(coeffs + h * POWERS)
    c1 = tl.load(coeffs + h * POWERS + 1)
    # computed anew behind a zero that the compiler does not know: addresses that it recognised
    # would occupy registers in the loop
    row += zero
    v = load_tile((v_in, v_b, v_h, v_n, n, UNITS), b, key_head, row, BM, D).to(tl.float32)
    if EXCLUSIVE:
        acc = acc / norm[:, None]
        if KEEPS:
            store_tile(u_rows, acc, b, h, row, BM, D)
        out = c0 * v + c1 * acc - own_part(acc, v, tl.load(coeffs + h * POWERS + 2))
    else:
        out = c0 * v + acc * (c1 / norm)[:, None]
    store_tile(out_rows, out, b, h, row, BM, D)


@triton.jit
def _attend_range(
    top, norm, acc, q, k_cols, v_cols, b, key_head, i, n, start, end,
    scale, D: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BN)
    sc = scale * LOG2E
    for col in tl.range(start, end, BN, num_stages=STAGES):
        k = load_tile(k_cols, b, key_head, col, BN, D)
        s = tl.dot(q, tl.trans(k))
        if MASKED:
            j = col + columns
            keep = (j < n)[None, :]
            if CAUSAL:
                keep = keep & (j[None, :] <= i[:, None])
            s = tl.where(keep, s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1) * sc)
        p = tl.exp2(s * sc - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        norm = norm * shrink + tl.sum(p, 1)
        v = load_tile(v_cols, b, key_head, col, BN, D)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        top = new_top
    return top, norm, acc


# keys and values of heads that go through their blocks together: half of an H200's cache
CACHED_BYTES = 24 * 2**20


# the fastest measured on an H200
TILES = Tiles(64, 64, 4, 2)
# wider steps where every query sees every key, from this length on
WIDE = Tiles(64, 128, 4, 2)
WIDE_FROM = 512


def tiles(length: int, is_causal: bool) -> Tiles:
    """The forward kernel's tiles for one call."""
    return WIDE if length >= WIDE_FROM and not is_causal else TILES


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coeffs: Tensor,
    mask: None,
    options: Options,
    lse: Tensor,
    u: Tensor | None = None,
) -> Tensor:
    """The filter, without a mask; ``lse`` is written, and ``u`` if it is given."""
    problem, powers = problem_of(q, k, mask, options), coeffs.shape[1]
    out = empty_like(q)
    launch = _launch(problem, powers, _strides(q, v), u is not None)
    launch((k, v, out, out if u is None else u), q, v, lse, coeffs)
    return out


_KERNEL = Kernel(attend_once, describe)


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    """Strides over sequences, heads and rows, in 16 bytes, of what a kernel reads by itself."""
    size = tensors[0].element_size()
    return tuple([stride * size // 16 for x in tensors for stride in x.stride()[:3]])


@functools.lru_cache(maxsize=1024)
def _launch(problem: Problem, powers: int, strides: tuple[int, ...], keeps: bool) -> Launch:
    """The kernel over the rows of one problem, ``strides`` as by :func:`_strides`."""
    scale, is_causal, _, exclusive = problem.options
    cut = tiles(problem.length, is_causal)
    blocks, total = -(-problem.length // cut.rows), problem.batch * problem.heads
    width = padded(problem.head_dim)
    return Launch(
        _KERNEL,
        (blocks * total, 1, 1),
        (*problem.variant, cut.warps, *(stride >= 2**31 for stride in strides)),
        [*[(1, 1, cut.cols, width)] * 2, *[(1, 1, cut.rows, width)] * 2],
        (
            *strides,
            problem.heads,
            problem.group,
            problem.length,
            scale,
            blocks,
            total,
            _heads_together(problem),
            0,
        ),
        (
            problem.head_dim * problem.dtype.itemsize // 16,
            width,
            cut.rows,
            cut.cols,
            cut.stages,
            powers,
            is_causal,
            keeps,
            exclusive,
        ),
        num_warps=cut.warps,
    )


def _heads_together(problem: Problem) -> int:
    """How many heads go through one block before any goes on to the next."""
    if not problem.options.is_causal:
        # all blocks take the same time: head by head, whose keys are then in the cache
        return 1
    head_bytes = 2 * problem.length * problem.head_dim * problem.dtype.itemsize
    return min(problem.batch * problem.heads, max(1, CACHED_BYTES // head_bytes))


# queries of a block, and of one of its two warpgroups, as in the kernel
ROWS = 128
HALF = 64


# at every head dim: the fastest measured on an H200 (results/kernels.md)
SWEEP_KEYS = 128
# tiles of keys, and of values, that are on the chip at a time
SWEEP_STAGES = 2


def attend_by_sweep(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coeffs: Tensor,
    mask: Tensor | None,
    options: Options,
    lse: Tensor,
    u: Tensor | None,
) -> Tensor:
    """The filter; ``lse`` is written, natural if it is ``(B, H, N)``, and ``u`` if it is given.

    Args:
        mask: spans at most, see :func:`~gfsa.kernels.launching.are_spans`.
    """
    problem = problem_of(q, k, mask, options)
    spans, _ = pointers(mask, None, unused=q)
    out = empty_like(q)
    counter = torch.zeros(1, dtype=torch.int32, device=q.device)
    launch = _sweep_launch(problem, coeffs.shape[1], u is not None, lse.dim() == 3)
    launch((q, k, v, out if u is None else u, out), lse, coeffs, counter, spans)
    return out


def _heads_at_a_time(problem: Problem) -> int:
    head_bytes = 2 * problem.length * problem.head_dim * problem.dtype.itemsize
    cached = max(1, CACHED_BYTES // head_bytes) * problem.group
    return min(problem.batch * problem.heads, cached)


@functools.lru_cache(maxsize=1024)
def _sweep_launch(problem: Problem, powers: int, keeps: bool, natural: bool) -> Launch:
    heads, blocks = problem.batch * problem.heads, -(-problem.length // ROWS)
    dim = problem.head_dim
    rows, keys = (1, 1, HALF, dim), (1, 1, SWEEP_KEYS, dim)
    return Launch(
        gluon_kernel("gluon_sweep_once", "attend_sweep"),
        (min(heads * blocks, multiprocessors(problem.device)), 1, 1),
        problem.variant,
        [rows, keys, keys, rows, rows],
        (
            heads,
            problem.heads,
            problem.group,
            problem.length,
            problem.options.scale,
            blocks,
            _heads_at_a_time(problem),
            problem.mask_strides[0],
        ),
        (
            *(dim, SWEEP_KEYS, SWEEP_STAGES, powers, keeps, natural, problem.mask_kind),
            problem.options.exclusive,
        ),
        num_warps=4,
    )


HOPPER_KERNELS = ("grad_queries_one", "grad_keys_one")
# at every head dim: with twice as many rows both kernels take longer (results/kernels.md)
HOPPER_TILES = hopper.Tiles(64, 64)


def gradient_by_hopper(
    g: Tensor, saved: Saved, options: Options
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As every gradient of ``op.py``; the exclusive term needs U, otherwise ``out`` is read."""
    q, k, v, u, out, lse, coeffs, mask, _ = saved
    lse = hopper.copyable_by_row(lse)
    problem, powers = problem_of(q, k, mask, options), coeffs.shape[1]
    spans, _ = pointers(mask, None, unused=q)
    delta, dq = torch.empty_like(lse), empty_like(q)
    queries = _hopper_launch("grad_queries_one", problem, powers)
    du, mixed = (empty_like(g), u) if options.exclusive else (g, out)
    queries((k, v, q, g, v, mixed, dq, du), delta, lse, coeffs, spans)
    # a row of k and v for each query head; heads that share keys are added up below
    dk, dv = (empty_like(x if problem.group == 1 else q) for x in (k, v))
    keys = _hopper_launch("grad_keys_one", problem, powers)
    sums = 2 + options.exclusive
    parts = coeffs.new_empty(problem.heads, sums, problem.batch * keys.grid[0])
    keys((q, du, lse, delta, k, v, g, mixed, dk, dv), parts, coeffs, spans)
    return dq, sum_groups(dk, k), sum_groups(dv, v), parts


@functools.lru_cache(maxsize=1024)
def _hopper_launch(name: str, problem: Problem, powers: int) -> Launch:
    kernel = gluon_kernel("gluon_hopper_once", name)
    scale, is_causal, _, exclusive = problem.options
    arguments: Any = inspect.signature(kernel.function.fn).parameters
    return Launch(
        kernel,
        (-(-problem.length // HOPPER_TILES.rows), problem.batch * problem.heads, 1),
        problem.variant,
        [
            block
            for argument in arguments
            if (block := hopper.block_of(argument, HOPPER_TILES, problem.head_dim))
        ],
        (problem.heads, problem.group, problem.length, scale, problem.mask_strides[0]),
        (
            problem.head_dim,
            HOPPER_TILES.rows,
            HOPPER_TILES.cols,
            is_causal,
            powers,
            problem.mask_kind,
            exclusive,
        ),
        num_warps=HOPPER_TILES.warps,
    )


def gradient_by_cudnn(
    g: Tensor, saved: Saved, options: Options
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As every gradient of ``op.py``, without a mask."""
    q, k, v, u, _, lse, coeffs, _, _ = saved
    # in the layout that attention's output has for such queries
    dv, du = empty_like(v), torch.empty_like(q)
    parts = launch_gradient(g, v, u, dv, du, coeffs, options.exclusive)
    u = laid_out(u, du.stride())
    dq, dk, first = attention_gradient(du, q, k, v, u, lse, options)
    torch.add(first, dv, out=dv)
    return _as(dq, q), _as(dk, k), dv, parts


def _as(x: Tensor, like: Tensor) -> Tensor:
    """``x``, or a copy that is laid out as results of the kernels are."""
    return x if x.stride() == result_strides(like) else empty_like(like).copy_(x)


def laid_out(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """``x``, or a copy with these strides.

    Torch looks cuDNN's plan for a gradient up by the layouts of q, k and v. The layouts of the
    output and its gradient have to follow from those, or torch silently runs the plan of another
    layout.
    """
    dims = zip(x.shape, x.stride(), strides, strict=True)
    if all(size == 1 or stride == wanted for size, stride, wanted in dims):
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def attention_gradient(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """cuDNN's; ``g`` and ``out`` as :func:`laid_out` lays them out for q, k and v."""
    length = q.shape[2]
    # the random state, of which dropout alone has need
    unused = torch.empty((), dtype=torch.int64, device=q.device)
    # contiguous strides, also if it is a slice of a larger tensor
    lse = lse.reshape(-1).view(*q.shape[:3], 1)
    gradients: Any = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        g, q, k, v, out, lse, unused, unused, None, None, None, length, length, 0.0,
        options.is_causal, scale=options.scale,
    )  # fmt: skip
    return gradients


def kept(q: Tensor, exclusive: bool, gradient: str) -> tuple[Tensor, Tensor]:
    """Room for U, empty if the gradient does without it, and for logsumexps.

    Logsumexps are natural for cuDNN, ``(B, H, N)``, and to base 2, ``(B, H, 1, N or more)``, for
    other kernels.
    """
    batch, heads, length, _ = q.shape
    keeps = gradient == "cudnn" or (exclusive and gradient != "none")
    shape: tuple[int, ...] = (batch, heads, 1, (length + 15) // 16 * 16)
    if gradient == "cudnn":
        shape = batch, heads, length
    u = empty_like(q) if keeps else q.new_empty(0)
    return u, q.new_empty(shape, dtype=torch.float32)
