r"""Degree 1 in one pass: ``out = c0·V + c1·A·V``, the forward kernel and its launch.

``A·V`` is neither written nor saved: what the filter adds is on chip already. With the exclusive
term, the share in a third column of the coefficients (formulas in ``degree_one.py``), the gradient
needs ``A·V``, which is then written and saved in place of the output.

Logsumexps are to base 2. Each head has a multiple of 16 of them, so that the copy engine can read
them; queries beyond the last one have an infinite logsumexp. Scales are positive. A program's own
rows are read by their addresses, ``…_in`` with strides, and a row of UNITS times 16 bytes: the copy
engine's loads outside of a loop would wait for one another.

``sweep.py`` has another forward, for causal calls; the gradient of both is in ``hopper.py``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gfsa.kernels.degree_one import own_part
from gfsa.kernels.launching import (
    LOG2E,
    Forward,
    Given,
    Inputs,
    Kernel,
    Launch,
    Launches,
    Options,
    Prepared,
    Problem,
    Room,
    Tiles,
    load_tile,
    padded,
    problem_of,
    room,
    room_like,
    store_tile,
    tiles_of,
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
    # keys that the whole block sees, then those to be masked
    for MASKED in tl.static_range(2):
        columns = tl.arange(0, BN)
        sc = scale * LOG2E
        for col in tl.range(
            clear if MASKED else 0, end if MASKED else clear, BN, num_stages=STAGES
        ):
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


def forward(given: Inputs) -> Forward:
    """As every route of ``op.py``, without a mask."""
    q, k, v, coeffs, _, _, options, keeps = given
    return _FORWARD((q, k, v), (coeffs,), None, options, keeps and options.exclusive)


def _prepare(given: Given, options: Options, keeps: bool) -> Prepared:
    q, v, coeffs = given["q"], given["v"], given["coeffs"]
    problem = problem_of(q, given["k"], None, options)
    rooms = {"out": room_like(q), **kept(q, keeps)}
    launch = _launch(problem, coeffs.shape[1], _strides(q, v), keeps)
    # an address that the kernel does not write may be any
    steps = [(launch, f"k v out {'u' if keeps else 'out'}", "q v lse coeffs")]
    return Prepared(given, rooms, steps, "out u lse")


_FORWARD = Launches[Forward](_prepare, "q k v", "coeffs")
_KERNEL = Kernel(attend_once)


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    """Strides over sequences, heads and rows, in 16 bytes, of what a kernel reads by itself."""
    size = tensors[0].element_size()
    return tuple([stride * size // 16 for x in tensors for stride in x.stride()[:3]])


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
        tiles_of(_KERNEL, cut, width),
        (*strides, *problem.sizes, scale, blocks, total, _heads_together(problem), 0),
        (
            *(problem.head_dim * problem.dtype.itemsize // 16, width),
            *(cut.rows, cut.cols, cut.stages, powers, is_causal, keeps, exclusive),
        ),
        num_warps=cut.warps,
    )


def _heads_together(problem: Problem) -> int:
    """How many heads go through one block before any goes on to the next."""
    if not problem.options.is_causal:
        # all blocks take the same time: head by head, whose keys are then in the cache
        return 1
    return min(problem.batch * problem.heads, heads_in_cache(problem))


def heads_in_cache(problem: Problem) -> int:
    """How many heads' keys and values stay in half of an H200's cache."""
    head_bytes = 2 * problem.length * problem.head_dim * problem.dtype.itemsize
    return max(1, CACHED_BYTES // head_bytes)


def kept(q: Tensor, keeps: bool) -> dict[str, Room]:
    """Room for U, empty unless it is kept, and for logsumexps, ``(B, H, 1, N or more)``."""
    batch, heads, length, _ = q.shape
    shape = batch, heads, 1, (length + 15) // 16 * 16
    u = room_like(q) if keeps else room((0,), q)
    return {"u": u, "lse": room(shape, q, dtype=torch.float32)}
