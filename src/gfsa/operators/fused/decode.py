r"""One decoded token in one launch: a filter of degree 2, with cached keys, values and ``U = A·V``.

.. math:: [u \mid w] = \sum_j p_j\,[v_j \mid U_j], \qquad p = \mathrm{softmax}(s\,K q), \qquad
    y = c_0 v + c_1 u + c_2 (w + p_{new}\,u)

U of past tokens does not change, and that of the new token is u itself, which the sum over past
tokens leaves out. One sweep over the cache therefore does both passes. Several programs share it.
"""

# no postponed annotations here: the operator's schema is read from them
import functools
from typing import Any

import torch
from torch import Tensor

from gfsa.operators.fused.autograd import needs_registered_operator
from gfsa.operators.fused.decode_kernel import STEP, decode_token
from gfsa.operators.fused.launcher import Kernel, Launch, multiprocessors, on_device_of
from gfsa.operators.fused.problem import padded

KEYS = 64
"""Cached tokens that a program reads at once."""
MOST_AHEAD = 100 * 1024
"""Bytes of keys, values and U that a program holds while the next ones are on their way."""
MOST_SPLITS = 32
"""Programs that share the keys of one head, a power of two at most."""


def takes_layout(*tensors: Tensor) -> bool:
    """Whether the kernel can read such tensors ``(B, H, N, D)``."""
    step: int = STEP.value
    for x in tensors:
        if x.stride(3) != 1 or any(stride % step for stride in x.stride()[:3]):
            return False
        # a compiled graph allocates its tensors itself
        if not torch.compiler.is_compiling() and x.data_ptr() % 16:
            return False
    return True


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    u: Tensor,
    coeffs: Tensor,
    mask: Tensor | None,
    place: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The new token's ``y`` and ``u = (A·V)_new``, each ``(B, H, 1, D)``.

    :func:`takes_layout` says which tensors it takes.

    Args:
        q: ``(B, H, 1, D)``, the new token's query.
        k, v: ``(B, H / group, N, D)``, keys and values including the new token's.
        u: ``(B, H, N or N - 1, D)``, ``A·V`` of past tokens, row by row beside their values.
        coeffs: ``(H, 3)``, float32.
        mask: bool, ``(B or 1, H or 1, 1, N)``, True takes part.
        place: one int64 on the device, the new token's row; None if it is the last one.
    """
    if needs_registered_operator(q):
        y, u_new = registered(q, k, v, u, coeffs, mask, place, scale)
        return y, u_new
    return _run(q, k, v, u, coeffs, mask, place, scale)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    u: Tensor,
    coeffs: Tensor,
    mask: Tensor | None,
    place: Tensor | None,
    scale: float,
    keep_counters: bool = True,
) -> tuple[Tensor, Tensor]:
    batch, heads, _, head_dim = q.shape
    y, u_new = (torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(2))
    seen = (0, 0, 0)
    if mask is not None:
        mask = mask.expand(batch, heads, 1, k.shape[2])
        seen = (mask.stride(0), mask.stride(1), mask.stride(3))
    splits = _splits(batch * heads, k.shape[2], q.device)
    numbers = (
        # the compiled code takes a float, and would be compiled again for an int
        *(float(scale), heads, heads // k.shape[1], k.shape[2] - 1, q.stride(0), q.stride(1)),
        *(stride // STEP.value for x in (k, v, u) for stride in x.stride()[:3]),
        *seen,
    )
    launch = _launch(
        batch * heads,
        head_dim,
        mask is not None,
        place is not None,
        splits,
        q.dtype,
        q.device,
        wide_numbers(numbers),
    )
    with on_device_of(q):
        sums, arrived = _room(batch * heads, splits, padded(head_dim), q, keep_counters)
        # a pointer that the kernel does not read may be any
        launch(
            (),
            *(q, k, v, u, coeffs.contiguous()),
            *(q if mask is None else mask.view(torch.uint8), q if place is None else place),
            *(y, u_new, sums, arrived),
            numbers=numbers,
        )
    return y, u_new


def wide_numbers(numbers: tuple[Any, ...]) -> tuple[bool, ...]:
    """Which of a call's numbers need 64 bits, which the compiled code has to know; often none."""
    if max(numbers) < 2**31:
        return ()
    return tuple([number >= 2**31 for number in numbers])


def _splits(heads: int, length: int, device: torch.device) -> int:
    """How many programs share a head: enough to fill the GPU twice, with a tile for each."""
    processors = multiprocessors(device.index) if device.type == "cuda" else 1
    wanted = min(-(-2 * processors // heads), -(-length // KEYS), MOST_SPLITS)
    # the largest power of two that is not more
    return 1 << (wanted.bit_length() - 1)


def _stages(width: int, dtype: torch.dtype) -> int:
    """Of the pipeline of loads: two have one tile on chip, waited for; three have the next, too."""
    tile = 3 * KEYS * width * dtype.itemsize
    return 3 if 2 * tile <= MOST_AHEAD else 2


def _room(
    heads: int, splits: int, width: int, q: Tensor, keep_counters: bool
) -> tuple[Tensor, Tensor]:
    """For the programs' sums, and counters that are zero; neither is used without splits.

    Args:
        keep_counters: whether later calls may find the counters again.
    """
    if splits == 1:
        return q, q
    sums = torch.empty(heads * splits * (2 * width + 3), dtype=torch.float32, device=q.device)
    if not keep_counters or not q.is_cuda or torch.cuda.is_current_stream_capturing():
        # a captured graph has counters of its own, which each replay sets to zero
        return sums, torch.zeros(heads, dtype=torch.int32, device=q.device)
    return sums, _counters(heads, q.device, torch.cuda.current_stream(q.device).cuda_stream)


@functools.lru_cache(maxsize=64)
def _counters(heads: int, device: torch.device, stream: int) -> Tensor:
    """Zeros, which every launch leaves as zeros; launches of other streams have their own."""
    return torch.zeros(heads, dtype=torch.int32, device=device)


@torch.library.custom_op("gfsa::decode", mutates_args=())
def registered(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    u: Tensor,
    coeffs: Tensor,
    mask: Tensor | None,
    place: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The registered operator."""
    # a graph's inputs may begin anywhere, which takes_layout cannot see while it is compiled
    q, k, v, u = (x.clone() if x.data_ptr() % 16 else x for x in (q, k, v, u))
    # nothing allocated here may be kept: mode="reduce-overhead" runs it in the memory of its graphs
    return _run(q, k, v, u, coeffs, mask, place, scale, keep_counters=False)


@registered.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape)


_KERNEL = Kernel(decode_token)


@functools.lru_cache(maxsize=64)
def _launch(
    programs: int,
    head_dim: int,
    masked: bool,
    on_device: bool,
    splits: int,
    dtype: torch.dtype,
    device: torch.device,
    wide: tuple[bool, ...],
) -> Launch:
    width = padded(head_dim)
    return Launch(
        _KERNEL,
        (programs, splits, 1),
        (device, dtype, wide),
        (),
        (),
        (head_dim, width, KEYS, masked, on_device, splits, _stages(width, dtype)),
        num_warps=4,
    )
