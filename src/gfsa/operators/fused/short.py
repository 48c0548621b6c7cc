"""The filter and its gradient in one launch each, for sequences that fit on chip.

The kernels are written in Gluon, Triton's lower-level language, whose interface changes from
version to version: :func:`why_not` says where they cannot run, and the passes of any length
take over.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gfsa.operators.fused.kernel import Block, Kernel, empty_like, variant
from gfsa.operators.fused.passes import Options, mask_arguments, padded, sum_groups
from gfsa.operators.fused.support import TRITON, capability, over_keys
from gfsa.operators.fused.tiles import FULL_MASK

LONGEST = 256
WIDEST = 64
# the versions whose Gluon these kernels were measured and tested with
TRITON_VERSIONS = ((3, 6),)


def why_not(q: Tensor, mask: Tensor | None, scale: float) -> str | None:
    """The reason why the short kernels cannot serve a call, or None if they can."""
    if q.shape[2] > LONGEST or q.shape[3] > WIDEST:
        return f"they take {LONGEST} tokens and a head dim of {WIDEST} at most"
    if not q.is_cuda or capability(q.device) != (9, 0):
        return "they are written for Hopper GPUs"
    if TRITON not in TRITON_VERSIONS:
        return f"they are written for Triton {TRITON_VERSIONS}, found {TRITON}"
    if scale <= 0.0:
        return "they take positive scales only"
    if mask is not None and not over_keys(mask):
        return "they take masks over keys only, the same for every head"
    return None


class Plan(NamedTuple):
    """How the kernels cut one length."""

    rows: int
    """Tokens, padded to what the warps hold: 16 a warp."""
    width: int
    """Keys a chunk."""
    full: int
    tail: int

    @property
    def block(self) -> Block:
        return 1, 1, self.rows, WIDEST

    @property
    def constants(self) -> tuple[int, int, int, int, int]:
        return self.rows, WIDEST, self.width, self.full, self.tail


@functools.cache
def plan(length: int, width: int) -> Plan:
    rows = max(64, padded(length))
    full, rest = divmod(length, width)
    tail = padded(rest) if rest else 0
    if tail == width:
        full, tail = full + 1, 0
    return Plan(rows, width, full, tail)


def forward(
    q: Tensor, k: Tensor, v: Tensor, coeffs: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """``(out, U, LSE)``, as :func:`gfsa.operators.fused.passes.forward`."""
    batch, heads, length, _ = q.shape
    cut = plan(length, 64)
    warps = cut.rows // 16
    out, u = empty_like(q), empty_like(q)
    lse = torch.empty((batch, heads, length), dtype=torch.float32, device=q.device)
    mask, (mask_b, _, _, mask_j), masked = _mask(q, k, options)
    dropout = options.dropout_p > 0.0
    # heads in flight on one multiprocessor, as registers and shared memory allow
    at_once = {4: 3, 8: 1 if dropout else 2, 16: 1}[warps]
    launch_options: dict[str, Any] = {"num_warps": warps}
    if at_once == 2:
        launch_options["maxnreg"] = 128
    kernels().filter_short(
        (min(batch * heads, at_once * _multiprocessors(q.device.index)), 1, 1),
        variant(q, k),
        [(x, cut.block) for x in (q, k, v, u, out)],
        (
            lse,
            coeffs,
            mask,
            lse if options.seed is None else options.seed,
            _zero(q.device.index),
            batch * heads,
            heads,
            heads // k.shape[1],
            length,
            options.scale,
            mask_b,
            mask_j,
            options.dropout_p,
        ),
        (*cut.constants, length <= 208, options.is_causal, masked, dropout),
        **launch_options,
    )
    return out, u, lse


def backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    u: Tensor,
    out: Tensor,
    lse: Tensor,
    coeffs: Tensor,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As :func:`gfsa.operators.fused.passes.backward`."""
    batch, heads, length, _ = q.shape
    group = heads // k.shape[1]
    cut = plan(length, 128 if 64 < length <= 128 else 64)
    dq = empty_like(q)
    dk, dv = (empty_like(x if group == 1 else q) for x in (k, v))
    dc = lse.new_empty(heads, 3, batch * cut.rows)
    mask, (mask_b, _, _, mask_j), masked = _mask(q, k, options)
    kernels().grad_short(
        (batch * heads, 1, 1),
        variant(q, k),
        [(x, cut.block) for x in (q, k, v, u, out, g, dq, dk, dv)],
        (
            lse,
            dc,
            coeffs,
            mask,
            lse if options.seed is None else options.seed,
            batch,
            heads,
            group,
            length,
            options.scale,
            mask_b,
            mask_j,
            options.dropout_p,
        ),
        (
            *cut.constants,
            cut.rows > 128,
            length == cut.rows,
            options.is_causal,
            masked,
            options.dropout_p > 0.0,
        ),
        num_warps=cut.rows // 16,
    )
    return dq, sum_groups(dk, k), sum_groups(dv, v), dc.sum(2)


class _Kernels:
    """Gluon and all that needs it, imported when first used."""

    def __init__(self) -> None:
        from triton.experimental.gluon.language import NVMMASharedLayout
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        from gfsa.operators.fused.short_backward import grad_short
        from gfsa.operators.fused.short_forward import filter_short

        layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)

        def describe(x: Tensor, block: Block) -> Any:
            return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block), layout)

        self.filter_short = Kernel(filter_short, describe)
        self.grad_short = Kernel(grad_short, describe)


@functools.cache
def kernels() -> _Kernels:
    return _Kernels()


def _mask(q: Tensor, k: Tensor, options: Options) -> tuple[Tensor, tuple[int, ...], bool]:
    sizes = (q.shape[1], q.shape[1] // k.shape[1], q.shape[2])
    mask, strides, kind = mask_arguments(sizes, options.mask)
    if kind == FULL_MASK.value or (strides[1] and q.shape[1] > 1):
        raise ValueError("the short kernels take masks over keys only, the same for every head")
    # a pointer that is never read stands in for a mask that is not there
    return q if mask is None else mask, strides, mask is not None


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _zero(device: int) -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=torch.device("cuda", device))
