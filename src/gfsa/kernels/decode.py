r"""One decoded token in one launch: a filter of degree 2, with cached keys, values and ``U = A·V``.

.. math:: [u \mid w] = \sum_j p_j\,[v_j \mid U_j], \qquad p = \mathrm{softmax}(s\,K q), \qquad
    y = c_0 v + c_1 u + c_2 (w + p_{new}\,u)

U of past tokens does not change, and that of the new token is u itself, which the sum over past
tokens leaves out. One sweep over the cache therefore does both passes. The same launch computes the
coefficients from θ and writes u into its row of the cache. A filter of degree 1,
:math:`y = c_0 v + c_1 u`, has no U, and nothing but y is written. The exclusive term takes
:math:`a p v` out of either, :math:`p = \langle u, v \rangle / \langle v, v \rangle`, with a as one
more coefficient.

**The kernel.** Several programs share the keys of a head, because one program would wait for its
loads most of the time. Each keeps its sums in float32; the last one to finish adds them up, always
in the same order. Inside of a program each row of a tile has a running maximum and sums of its own,
so that nothing is exchanged between threads while tiles are read, except to add up a score. The
rows are added up after the last tile, by the same formula as programs are:

.. math:: \Sigma = \sum_r 2^{t_r - t}\,\Sigma_r, \qquad t = \max_r t_r
"""

# no postponed annotations here: the operator's schema is read from them
import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from gfsa.kernels.launching import (
    LOG2E,
    Direct,
    Grid,
    Kernel,
    Launch,
    multiprocessors,
    needs_registered_operator,
    on_device_of,
    padded,
)
from gfsa.operators.operator import PLAIN, Coefficients, value_of

STEP = tl.constexpr(8)
"""Strides of the cache are multiples of it, so that a thread reads 16 bytes at once."""


# lengths and strides change from token to token: nothing about them is compiled in
@triton.jit(
    do_not_specialize=[
        *("scale", "heads", "group", "last", "q_b", "q_h", "k_b", "k_h", "k_n"),
        *("v_b", "v_h", "v_n", "u_b", "u_h", "u_n", "mask_b", "mask_h", "mask_n"),
    ],
    do_not_specialize_on_alignment=[
        *("theta", "base", "basis", "mask", "length", "arrived"),
    ],
)
def decode_token(
    q_in, k_in, v_in, u_rows, theta, base, basis, mask, length, y_out, sums, arrived,
    scale, heads, group, last, q_b, q_h, k_b, k_h, k_n, v_b, v_h, v_n, u_b, u_h, u_n,
    mask_b, mask_h, mask_n,
    D: tl.constexpr, WIDTH: tl.constexpr, BN: tl.constexpr, LEARNED: tl.constexpr,
    BY_HEAD: tl.constexpr, MASK: tl.constexpr, ON_DEVICE: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr, DEGREE: tl.constexpr, EXCLUSIVE: tl.constexpr,
):  # fmt: skip
    """One query head of one sequence: its row of y, and with degree 2 its row of U in the cache.

    Strides of k, v and u are counted in :data:`STEP` numbers.

    Args:
        u_rows: read and written with degree 2 alone.
        theta, base, basis: see :func:`_coefficients`.
        length: with ``ON_DEVICE``, how many tokens there are, the new one included.
        sums: room for ``(programs, SPLITS, DEGREE·WIDTH + DEGREE + 1)`` numbers, float32.
        arrived: for each head how many programs are done, int32; zero before and after.
    """
    # 64 bits: a cache may have more than 2³¹ numbers
    b = (tl.program_id(0) // heads).to(tl.int64)
    h = (tl.program_id(0) % heads).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < D
    new = tl.load(length).to(tl.int32) - 1 if ON_DEVICE else last
    q = tl.load(q_in + b * q_b + h * q_h + column, mask=inside, other=0.0).to(tl.float32)
    q = q * (scale * LOG2E)
    k_in += (b * k_b + (h // group) * k_h) * STEP
    v_in += (b * v_b + (h // group) * v_h) * STEP
    u_rows += (b * u_b + h * u_h) * STEP
    # loaded before the loop: at the end the program that finishes a head would wait for them
    c = _coefficients(theta, base, basis, h, LEARNED, BY_HEAD, DEGREE + 1 + EXCLUSIVE)
    # from row to row
    k_step = k_n.to(tl.int64) * STEP
    v_step = v_n.to(tl.int64) * STEP
    u_step = u_n.to(tl.int64) * STEP
    # of each row of a tile: the largest score, the sum of weights, the new token's weight, and
    # both sums of rows; with degree 1 nothing reads own and w, and the compiler drops them
    top = tl.full([BN], -float("inf"), tl.float32)
    total = tl.zeros([BN], tl.float32)
    own = tl.zeros([BN], tl.float32)
    u = tl.zeros([BN, WIDTH], tl.float32)
    w = tl.zeros([BN, WIDTH], tl.float32)
    # whole tiles for each program, so that none is read twice; of the tokens that there are, not of
    # the rows that there is room for: all programs work, and the time follows the length
    tiles = tl.cdiv(tl.cdiv(new + 1, BN), SPLITS)
    begin = tl.program_id(1) * tiles * BN
    newest = v_in + new.to(tl.int64) * v_step
    u_out = u_rows + new.to(tl.int64) * u_step
    own_v = tl.load(newest + column, mask=inside, other=0.0).to(tl.float32)
    if MASK:
        mask += b * mask_b + h * mask_h
        first = begin + tl.arange(0, BN)
        ahead = tl.load(mask + first.to(tl.int64) * mask_n, first <= new, 0)
    for start in tl.range(begin, tl.minimum(begin + tiles * BN, new + 1), BN, num_stages=STAGES):
        row = (start + tl.arange(0, BN)).to(tl.int64)
        seen = row <= new
        some = seen[:, None] & inside[None, :]
        k = tl.load(k_in + row[:, None] * k_step + column[None, :], mask=some, other=0.0)
        v = tl.load(v_in + row[:, None] * v_step + column[None, :], mask=some, other=0.0)
        if DEGREE == 2:
            # the new token's row of U is written below
            cached = (row < new)[:, None] & inside[None, :]
            past_u = u_rows + row[:, None] * u_step + column[None, :]
            other = tl.load(past_u, mask=cached, other=0.0)
        score = tl.sum(k.to(tl.float32) * q[None, :], 1)
        if MASK:
            seen = seen & (ahead != 0)
            # the compiler does not pipeline loads this narrow, so the next mask is prefetched here
            ahead = tl.load(mask + (row + BN) * mask_n, row + BN <= new, 0)
        score = tl.where(seen, score, -float("inf"))
        higher = tl.maximum(top, score)
        shift = _finite(higher)
        shrink = tl.exp2(top - shift)
        p = tl.exp2(score - shift)
        past = tl.where(row < new, p, 0.0)
        total = total * shrink + p
        own = own * shrink + (p - past)
        u = u * shrink[:, None] + p[:, None] * v.to(tl.float32)
        if DEGREE == 2:
            w = w * shrink[:, None] + past[:, None] * other.to(tl.float32)
        top = higher
    highest = tl.max(top, 0)
    weight = tl.exp2(top - _finite(highest))
    u, w, total, own = _together(weight, u, w, total, own, DEGREE)
    if SPLITS == 1:
        _finish(u, w, total, own, own_v, c, y_out, u_out, D, WIDTH, DEGREE, EXCLUSIVE)
    else:
        # of one program: u, with degree 2 also w, then the numbers
        ROWS: tl.constexpr = DEGREE * WIDTH
        PART: tl.constexpr = ROWS + DEGREE + 1
        head = tl.program_id(0)
        sums += head.to(tl.int64) * (SPLITS * PART)
        part = sums + tl.program_id(1) * PART
        tl.store(part + column, u)
        if DEGREE == 2:
            tl.store(part + WIDTH + column, w)
        tl.store(part + ROWS, highest)
        tl.store(part + ROWS + 1, total)
        if DEGREE == 2:
            tl.store(part + ROWS + 2, own)
        # all threads have written before the first one says so
        tl.debug_barrier()
        if tl.atomic_add(arrived + head, 1, sem="acq_rel") == SPLITS - 1:
            # for the next launch
            tl.store(arrived + head, 0)
            parts = sums + tl.arange(0, SPLITS) * PART
            tops = tl.load(parts + ROWS, cache_modifier=".cg")
            totals = tl.load(parts + ROWS + 1, cache_modifier=".cg")
            owns, ws = own, w
            if DEGREE == 2:
                owns = tl.load(parts + ROWS + 2, cache_modifier=".cg")
            rows = parts[:, None] + column[None, :]
            us = tl.load(rows, cache_modifier=".cg")
            if DEGREE == 2:
                ws = tl.load(rows + WIDTH, cache_modifier=".cg")
            weights = tl.exp2(tops - _finite(tl.max(tops, 0)))
            u, w, total, own = _together(weights, us, ws, totals, owns, DEGREE)
            _finish(u, w, total, own, own_v, c, y_out, u_out, D, WIDTH, DEGREE, EXCLUSIVE)


@triton.jit
def _finite(top):
    """While nothing has been seen, -inf - (-inf) would be NaN."""
    return tl.where(top == -float("inf"), 0.0, top)


@triton.jit
def _together(weight, u, w, total, own, DEGREE):
    """Sums over the first axis, each entry weighted; with degree 1 of u and total alone."""
    if DEGREE == 2:
        # two sums per reduction: half as many barriers between the warps
        u, w = tl.split(tl.sum(tl.join(u * weight[:, None], w * weight[:, None]), 0))
        total, own = tl.split(tl.sum(tl.join(total * weight, own * weight), 0))
    else:
        u = tl.sum(u * weight[:, None], 0)
        total = tl.sum(total * weight, 0)
    return u, w, total, own


@triton.jit
def _finish(u, w, total, own, v, c, y_out, u_out, D, WIDTH, DEGREE, EXCLUSIVE):
    """``u = Σ p·v`` and ``y = c0·v + c1·u + c2·(w + p_new·u)`` from plain sums of weights."""
    column = tl.arange(0, WIDTH)
    inside = column < D
    # a token that sees nothing has a row of zeros
    share = tl.where(total > 0.0, 1.0 / tl.where(total > 0.0, total, 1.0), 0.0)
    u = u * share
    if DEGREE == 2:
        # rounded as it is cached: later tokens see it so
        rounded = u.to(u_out.dtype.element_ty)
        own = own * share
        u = rounded.to(tl.float32)
        second = w * share + own * u
    power = tl.arange(0, c.shape[0])
    c0 = tl.sum(tl.where(power == 0, c, 0.0), 0)
    c1 = tl.sum(tl.where(power == 1, c, 0.0), 0)
    c2 = tl.sum(tl.where(power == 2, c, 0.0), 0)
    y = c0 * v + c1 * u
    if DEGREE == 2:
        y += c2 * second
        tl.store(u_out + column, rounded, mask=inside)
    if EXCLUSIVE:
        # p is 0 for a v that is zero, or whose square is not finite
        square = tl.sum(v * v, 0)
        has_direction = (square > 0.0) & (square < float("inf"))
        v = tl.where(has_direction, v, 0.0)
        along = tl.sum(u * v, 0) / tl.where(has_direction, square, 1.0)
        y -= tl.sum(tl.where(power == DEGREE + 1, c, 0.0), 0) * along * v
    y_out += tl.program_id(0).to(tl.int64) * D + column
    tl.store(y_out, y.to(y_out.dtype.element_ty), mask=inside)


@triton.jit
def _coefficients(theta, base, basis, h, LEARNED, BY_HEAD, COUNT):
    """``c = base + θ·basis`` of one head: c0, c1 …, the share, then a zero if there is room.

    Args:
        theta: ``(H, LEARNED)``; base: ``(H, COUNT)``; basis: ``(LEARNED, COUNT)``, with ``BY_HEAD``
            one for each head. Without learned numbers the base alone is read.
    """
    # Triton's ranges have a power of two entries
    power = tl.arange(0, 2 if COUNT == 2 else 4)
    c = tl.load(base + h * COUNT + power, power < COUNT, 0.0)
    for number in tl.static_range(LEARNED):
        learned = tl.load(theta + h * LEARNED + number).to(tl.float32)
        row = (h * LEARNED + number) if BY_HEAD else number
        c += learned * tl.load(basis + row * COUNT + power, power < COUNT, 0.0)
    return c


_STEP: int = STEP.value
MOST_SPLITS = 32
"""Programs that share the keys of one head, a power of two at most."""
_THETA = (torch.float32, torch.bfloat16, torch.float16)


STAGES = 3
"""Of its loads: while one tile is waited for, the next is on its way, too."""


def tile_of(width: int) -> tuple[int, int]:
    """Cached tokens that a program reads at once, and its warps, for a head dim.

    Each thread has 16 numbers of the tile, whose sums are 32 registers. With twice as many, two
    programs of 128 threads have registers on a processor instead of five.
    """
    return (32, 4) if width <= 64 else (32, 8) if width <= 128 else (16, 8)


class Token(NamedTuple):
    """What the kernel reads and writes for a new token: see :func:`decode`."""

    q: Tensor
    k: Tensor
    v: Tensor
    u: Tensor | None
    theta: Tensor | None
    base: Tensor
    basis: Tensor | None
    mask: Tensor | None
    length: Tensor | None


def takes_layout(*tensors: Tensor) -> bool:
    """Whether the kernel can read such tensors ``(B, H, N, D)``."""
    # a compiled graph allocates its tensors itself
    compiling = torch.compiler.is_compiling()
    for x in tensors:
        batch, head, row, column = x.stride()
        if column != 1 or batch % _STEP or head % _STEP or row % _STEP:
            return False
        if not compiling and x.data_ptr() % 16:
            return False
    return True


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    u: Tensor | None,
    coeffs: Tensor | Coefficients,
    mask: Tensor | None,
    length: Tensor | None,
    scale: float,
    counters: Tensor | None = None,
    share: Tensor | None = None,
) -> Tensor:
    """The new token's ``y (B, H, 1, D)``; its ``(A·V)_new`` is written into its row of ``u``.

    :func:`takes_layout` says which tensors it takes.

    Args:
        q: ``(B, H, 1, D)``, the new token's query.
        k, v: ``(B, H / group, N, D)``, keys and values including the new token's.
        u: ``(B, H, N or more, D)``, ``A·V`` of past tokens, row by row beside their values; None
            for a filter of degree 1.
        coeffs: ``(H, 3)`` or ``(3,)``, or a filter's coefficients; of degree 1 two for each head.
        mask: bool, ``(B or 1, H or 1, 1, N)``, True takes part.
        length: one int64 on the device: how many tokens there are with the new one, which is the
            last of them; None if these are all N.
        counters: of :func:`new_counters` for B·H heads; given, a captured step needs not set them
            to zero.
        share: of the exclusive term, ``(H,)`` or one number for all heads.
    """
    theta, base, basis = numbers_of(coeffs if share is None else value_of(coeffs), q.shape[1])
    exclusive = share is not None
    if share is not None:
        base = torch.cat((base, share.float().expand(q.shape[1])[:, None]), 1)
    token = Token(q, k, v, u, theta, base, basis, mask, length)
    if needs_registered_operator(q):
        if u is None and counters is None and torch.compiler.is_compiling():
            # torch's compiler fails on an operator none of whose written arguments is given
            counters = new_counters(q.shape[0] * q.shape[1], q.device)
        y: Tensor = registered(*token, counters, scale, exclusive)
        return y
    return _run(token, counters, scale, exclusive)


def numbers_of(
    coeffs: Tensor | Coefficients, heads: int
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """θ, base and basis as the kernel reads them; or the coefficients, as a base alone."""
    if isinstance(coeffs, Coefficients):
        theta, base, basis, _ = coeffs
        if (
            type(theta) in PLAIN
            and theta.device == base.device
            and theta.dtype in _THETA
            and base.dtype == basis.dtype == torch.float32
            and theta.is_contiguous()
            and base.is_contiguous()
            and basis.is_contiguous()
        ):
            return theta, base, basis
    return None, value_of(coeffs).float().expand(heads, -1).contiguous(), None


def launch_for(
    token: Token, scale: float, exclusive: bool = False
) -> tuple[Launch, tuple[Any, ...], int]:
    """The launch for tensors of such shapes and layouts, its numbers, and how many sums it needs.

    These are the numbers by which the programs that share a head exchange their sums; 0 for one
    program.
    """
    q, k, v, u, theta, base, basis, mask, length = token
    batch, heads, _, head_dim = q.shape
    _, groups, rows, _ = k.shape
    seen = (0, 0, 0)
    if mask is not None:
        expanded = mask.expand(batch, heads, 1, rows)
        seen = (expanded.stride(0), expanded.stride(1), expanded.stride(3))
    learned, by_head = (0, False)
    if theta is not None and basis is not None:
        learned, by_head = theta.shape[1], basis.dim() == 3
    width = _width(head_dim)
    keys, warps = tile_of(width)
    splits = _splits(batch * heads, -(-rows // keys), q.device.index if q.is_cuda else None)
    degree = base.shape[1] - 1 - exclusive
    assert degree == (1 if u is None else 2)
    cached = *k.stride()[:3], *v.stride()[:3], *((0, 0, 0) if u is None else u.stride()[:3])
    numbers = (
        # the compiled code takes a float, and would be compiled again for an int
        *(float(scale), heads, heads // groups, rows - 1, *q.stride()[:2]),
        *[stride // _STEP for stride in cached],
        *seen,
    )
    constants = (
        *(head_dim, width, keys, learned, by_head, mask is not None, length is not None),
        *(splits, STAGES, degree, exclusive),
    )
    types = q.dtype, base.dtype if theta is None else theta.dtype
    variant = (q.device, *types, wide_numbers(numbers))
    launch = _launch((batch * heads, splits, 1), variant, constants, warps)
    # of each program: u and with degree 2 w, the largest score and as many sums of weights
    part = degree * width + 1 + degree
    return launch, numbers, batch * heads * splits * part if splits > 1 else 0


def _run(
    token: Token, counters: Tensor | None, scale: float, exclusive: bool, keep_room: bool = True
) -> Tensor:
    launch, numbers, count = launch_for(token, scale, exclusive)
    q, k, v, u, theta, base, basis, mask, length = token
    y = q.new_empty(q.shape)
    room = q, q
    if count:
        room = _room(count, q.shape[0] * q.shape[1], counters, q.device, keep_room)
    # a pointer that the kernel does not read may be any
    pointers = (
        *(q, k, v, v if u is None else u),
        *(base if theta is None else theta, base, base if basis is None else basis),
        *(q if mask is None else mask.view(torch.uint8), q if length is None else length),
        *(y, *room),
    )
    on_device_of(q, launch, (), *pointers, numbers=numbers)
    return y


def wide_numbers(numbers: tuple[Any, ...]) -> tuple[bool, ...]:
    """Which of a call's numbers need 64 bits, which the compiled code has to know; often none."""
    if max(numbers) < 2**31:
        return ()
    return tuple([number >= 2**31 for number in numbers])


_width = functools.cache(padded)


@functools.lru_cache(maxsize=1024)
def _splits(heads: int, tiles: int, device: int | None) -> int:
    """How many programs share a head: enough to fill the GPU twice, with a tile for each."""
    processors = 1 if device is None else multiprocessors(device)
    wanted = min(-(-2 * processors // heads), tiles, MOST_SPLITS)
    # the largest power of two that is not more
    return 1 << (wanted.bit_length() - 1)


def _room(
    count: int, heads: int, counters: Tensor | None, device: torch.device, keep_room: bool
) -> tuple[Tensor, Tensor]:
    """For ``count`` sums of the programs, and a counter for each head, which is zero.

    Args:
        keep_room: whether later calls may find it again.
    """
    if keep_room and device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        stream = driver.active.get_current_stream(device.index)
        sums, zeros = kept_room(count, heads, device, stream)
        return sums, zeros if counters is None else counters
    sums = torch.empty(count, dtype=torch.float32, device=device)
    if counters is None:
        # a captured graph has counters of its own, which each replay sets to zero
        counters = new_counters(heads, device)
    return sums, counters


@functools.lru_cache(maxsize=64)
def kept_room(count: int, heads: int, device: torch.device, stream: int) -> tuple[Tensor, Tensor]:
    """Every launch leaves the counters as zeros; launches of other streams have their own room."""
    # never as inference tensors, which could not be used outside of inference mode
    with torch.inference_mode(False):
        sums = torch.empty(count, dtype=torch.float32, device=device)
        return sums, new_counters(heads, device)


def new_counters(heads: int, device: torch.device) -> Tensor:
    """Counters for launches that do not overlap, such as those on one layer of a cache.

    Args:
        heads: query heads of all sequences.
    """
    return torch.zeros(heads, dtype=torch.int32, device=device)


@torch.library.custom_op("gfsa::decode", mutates_args=("u", "counters"))
def registered(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    u: Tensor | None,
    theta: Tensor | None,
    base: Tensor,
    basis: Tensor | None,
    mask: Tensor | None,
    length: Tensor | None,
    counters: Tensor | None,
    scale: float,
    exclusive: bool,
) -> Tensor:
    """The registered operator."""
    # a graph's inputs may begin anywhere, which takes_layout cannot see while it is compiled
    q, k, v = (x.clone() if x.data_ptr() % 16 else x for x in (q, k, v))
    aligned = u.clone() if u is not None and u.data_ptr() % 16 else u
    # nothing allocated here may be kept: mode="reduce-overhead" runs it in the memory of its graphs
    token = Token(q, k, v, aligned, theta, base, basis, mask, length)
    y = _run(token, counters, scale, exclusive, keep_room=False)
    if u is not None and aligned is not None and aligned is not u:
        u.copy_(aligned)
    return y


@registered.register_fake
def _(q: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape)


_KERNEL = Kernel(decode_token)


@functools.lru_cache(maxsize=256)
def _launch(grid: Grid, variant: tuple[Any, ...], constants: tuple[Any, ...], warps: int) -> Launch:
    return Launch(_KERNEL, grid, variant, (), (), constants, num_warps=warps)


class PreparedToken:
    """:func:`decode` in eager mode, for tensors of one shape and layout: addresses alone change.

    It is for plain tensors and a filter's coefficients that the kernel computes itself
    (:func:`numbers_of`), outside of compilers.
    """

    def __init__(self, q: Tensor) -> None:
        self.heads = q.shape[0] * q.shape[1]
        self.device = q.device
        # of one GPU it needs not be asked whether it is the current one
        self.is_only_gpu = torch.cuda.device_count() <= 1
        # by the strides of u, which has free rows or none; a filter of degree 1 has no u
        self.ready: dict[tuple[int, ...] | None, tuple[Direct, tuple[Any, ...], int]] = {}

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        u: Tensor | None,
        coeffs: Coefficients,
        mask: Tensor | None,
        length: Tensor | None,
        scale: float,
        counters: Tensor | None = None,
    ) -> Tensor:
        """As :func:`decode`."""
        layout = None if u is None else u.stride()
        found = self.ready.get(layout)
        if found is None:
            token = Token(q, k, v, u, *coeffs[:3], mask, length)
            launch, numbers, count = launch_for(token, scale)
            direct = launch.direct
            # otherwise its code is not compiled yet
            if isinstance(direct, Direct):
                found = self.ready[layout] = direct, numbers, count
        # a captured graph has room of its own
        if found is None or (found[2] and torch.cuda.is_current_stream_capturing()):
            return decode(q, k, v, u, coeffs, mask, length, scale, counters)
        direct, numbers, count = found
        theta, base, basis, _ = coeffs
        q_at, k_at, v_at = q.data_ptr(), k.data_ptr(), v.data_ptr()
        u_at = v_at if u is None else u.data_ptr()
        if (q_at | k_at | v_at | u_at) % 16:
            # which copies what the kernel cannot load 16 bytes at a time
            given = q, k, v, u, theta, base, basis, mask, length
            copied: Tensor = registered(*given, counters, scale, False)
            return copied
        y = q.new_empty(q.shape)
        stream = direct.stream(self.device.index)
        sums = arrived = q_at
        if count:
            room, zeros = kept_room(count, self.heads, self.device, stream)
            sums = room.data_ptr()
            arrived = (zeros if counters is None else counters).data_ptr()
        addresses = (
            *(q_at, k_at, v_at, u_at, theta.data_ptr(), base.data_ptr(), basis.data_ptr()),
            # an address that the kernel does not read may be any
            q_at if mask is None else mask.data_ptr(),
            q_at if length is None else length.data_ptr(),
            *(y.data_ptr(), sums, arrived),
        )
        try:
            if self.is_only_gpu:
                direct.at(stream, addresses, numbers)
            else:
                on_device_of(q, direct.at, stream, addresses, numbers)
        except TypeError:
            # raised before anything is launched
            return decode(q, k, v, u, coeffs, mask, length, scale, counters)
        return y
