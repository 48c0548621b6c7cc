r"""One decoded token in one launch: a filter of degree 2, with cached keys, values and ``U = A·V``.

.. math:: [u \mid w] = \sum_j p_j\,[v_j \mid U_j], \qquad p = \mathrm{softmax}(s\,K q), \qquad
    y = c_0 v + c_1 u + c_2 (w + p_{new}\,u)

U of past tokens does not change, and that of the new token is u itself, which the sum over past
tokens leaves out. One sweep over the cache therefore does both passes. Several programs share it.
The same launch computes the coefficients from θ and writes u into its row of the cache.

A filter of degree 1, :math:`y = c_0 v + c_1 u`, needs keys and values alone: it has no U, and
nothing but y is written.
"""

# no postponed annotations here: the operator's schema is read from them
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime import driver

from gfsa.kernels.autograd import needs_registered_operator
from gfsa.kernels.decode_kernel import STEP, decode_token
from gfsa.kernels.launcher import Kernel, Launch, multiprocessors, on_device_of
from gfsa.kernels.problem import padded
from gfsa.operators.base import PLAIN, Coefficients, value_of

_STEP: int = STEP.value
MOST_SPLITS = 32
"""Programs that share the keys of one head, a power of two at most."""
_THETA = (torch.float32, torch.bfloat16, torch.float16)


class Tile(NamedTuple):
    """Cached tokens that a program reads at once, its warps, and the stages of its loads.

    Two stages have one tile on chip, waited for; three have the next, too.
    """

    keys: int
    warps: int
    stages: int


@functools.cache
def tile_of(width: int) -> Tile:
    """The tile for a head dim: 16 numbers of it for each thread, whose sums are 32 registers.

    With twice as many, two programs of 128 threads have registers on a processor instead of five.
    """
    keys, warps = (32, 4) if width <= 64 else (32, 8) if width <= 128 else (16, 8)
    return Tile(keys, warps, 3)


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
    """
    theta, base, basis = numbers_of(coeffs, q.shape[1])
    if needs_registered_operator(q):
        if u is None and counters is None and torch.compiler.is_compiling():
            # torch's compiler fails on an operator none of whose written arguments is given
            counters = new_counters(q.shape[0] * q.shape[1], q.device)
        y: Tensor = registered(q, k, v, u, theta, base, basis, mask, length, counters, scale)
        return y
    return _run(q, k, v, u, theta, base, basis, mask, length, counters, scale)


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


class Ready(NamedTuple):
    """The kernel for tensors of one shape and layout: all but addresses."""

    launch: Launch
    numbers: tuple[Any, ...]
    sums: int
    """Numbers by which the programs that share a head exchange their sums; 0 for one program."""


def ready_for(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    u: Tensor | None,
    theta: Tensor | None,
    base: Tensor,
    basis: Tensor | None,
    mask: Tensor | None,
    on_device: bool,
    scale: float,
) -> Ready:
    """How to launch the kernel on such tensors; ``on_device``: whether the length is there."""
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
    tile = tile_of(width)
    splits = _splits(batch * heads, -(-rows // tile.keys), q.device.index if q.is_cuda else None)
    q_b, q_h, _, _ = q.stride()
    k_b, k_h, k_n, _ = k.stride()
    v_b, v_h, v_n, _ = v.stride()
    degree = base.shape[1] - 1
    assert degree == (1 if u is None else 2)
    u_b, u_h, u_n, _ = (0, 0, 0, 0) if u is None else u.stride()
    numbers = (
        # the compiled code takes a float, and would be compiled again for an int
        *(float(scale), heads, heads // groups, rows - 1, q_b, q_h),
        *(k_b // _STEP, k_h // _STEP, k_n // _STEP, v_b // _STEP, v_h // _STEP, v_n // _STEP),
        *(u_b // _STEP, u_h // _STEP, u_n // _STEP, *seen),
    )
    launch = _launch(
        *(batch * heads, head_dim, tile, learned, by_head, mask is not None, on_device),
        *(splits, degree, q.dtype, base.dtype if theta is None else theta.dtype, q.device),
        wide_numbers(numbers),
    )
    # of each program: u and with degree 2 w, the largest score and as many sums of weights
    part = degree * width + 1 + degree
    return Ready(launch, numbers, batch * heads * splits * part if splits > 1 else 0)


def _run(
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
    keep_room: bool = True,
) -> Tensor:
    launch, numbers, count = ready_for(
        *(q, k, v, u, theta, base, basis, mask, length is not None, scale)
    )
    y = q.new_empty(q.shape)
    sums, arrived = q, q
    if count:
        sums, arrived = _room(count, q.shape[0] * q.shape[1], counters, q.device, keep_room)
    # a pointer that the kernel does not read may be any
    pointers = (
        *(q, k, v, v if u is None else u),
        *(base if theta is None else theta, base, base if basis is None else basis),
        *(
            q if mask is None else mask.view(torch.uint8),
            q if length is None else length,
        ),
        *(y, sums, arrived),
    )
    with on_device_of(q):
        launch((), *pointers, numbers=numbers)
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
) -> Tensor:
    """The registered operator."""
    # a graph's inputs may begin anywhere, which takes_layout cannot see while it is compiled
    q, k, v = (x.clone() if x.data_ptr() % 16 else x for x in (q, k, v))
    aligned = u.clone() if u is not None and u.data_ptr() % 16 else u
    # nothing allocated here may be kept: mode="reduce-overhead" runs it in the memory of its graphs
    y = _run(
        *(q, k, v, aligned, theta, base, basis, mask, length, counters, scale),
        keep_room=False,
    )
    if u is not None and aligned is not None and aligned is not u:
        u.copy_(aligned)
    return y


@registered.register_fake
def _(
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
) -> Tensor:
    return q.new_empty(q.shape)


_KERNEL = Kernel(decode_token)


@functools.lru_cache(maxsize=256)
def _launch(
    programs: int,
    head_dim: int,
    tile: Tile,
    learned: int,
    by_head: bool,
    masked: bool,
    on_device: bool,
    splits: int,
    degree: int,
    dtype: torch.dtype,
    theta: torch.dtype,
    device: torch.device,
    wide: tuple[bool, ...],
) -> Launch:
    constants = (
        *(head_dim, padded(head_dim), tile.keys, learned, by_head, masked, on_device, splits),
        *(tile.stages, degree),
    )
    return Launch(
        *(_KERNEL, (programs, splits, 1), (device, dtype, theta, wide), (), (), constants),
        num_warps=tile.warps,
    )
