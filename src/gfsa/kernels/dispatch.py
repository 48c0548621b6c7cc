"""Which kernels run a call: short, long, one causal sweep, and others for a gradient.

A path is a module with the two functions of :class:`Path`. All paths give and save the same
tensors, so the backward pass may take another path than the forward pass did.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from gfsa.kernels.eligibility import refusal_by_short, refusal_by_sweep
from gfsa.kernels.hopper import backward_path as hopper_backward
from gfsa.kernels.launcher import on_device_of
from gfsa.kernels.layout import copyable_by_tile
from gfsa.kernels.long import launch as long
from gfsa.kernels.problem import Options, Saved
from gfsa.kernels.short import launch as short
from gfsa.kernels.sweep import launch as sweep


class Path(Protocol):
    """The filter of degree 2 and its gradient by one set of kernels."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        coeffs: Tensor,
        mask: Tensor | None,
        seed: Tensor | None,
        options: Options,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``(out, U, LSE)``: the filter, ``A·V``, and each row's natural logsumexp ``(B, H, N)``.

        Args:
            q: ``(B, H, N, D)``; k, v: ``(B, H / group, N, D)``.
            coeffs: ``(H, 3)``, float32, contiguous.
            mask: bool, broadcastable to ``(B, H, N, N)``, True takes part; or spans with causality,
                see :func:`~gfsa.kernels.problem.are_spans`.
            seed: one int64 on the device, which decides what dropout drops; None without dropout.
        """

    def backward(
        self, g: Tensor, saved: Saved, options: Options
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gradients of q, k and v, and partial sums of the coefficients' ``(H, 3, any number)``."""


def forward_path(q: Tensor, mask: Tensor | None, options: Options) -> Path:
    """The fastest kernels that serve a call."""
    if refusal_by_short(q, mask, options.scale) is None:
        return short
    return long if refusal_by_sweep(q, mask, *options) is not None else sweep


def backward_path(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: Options) -> Path:
    """The fastest kernels that serve the gradient of a call."""
    path = forward_path(q, mask, options)
    if path is not short and hopper_backward.serves(q, mask, options):
        return hopper_backward
    return path


def run_forward(
    path: Path,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coeffs: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:
    """:meth:`Path.forward` on tensors of any layout, on their device."""
    q, k, v = copyable_by_tile(q), copyable_by_tile(k), copyable_by_tile(v)
    with on_device_of(q):
        return path.forward(q, k, v, coeffs.contiguous(), mask, seed, options)


def run_backward(
    path: Path, g: Tensor, saved: Saved, options: Options
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:meth:`Path.backward` on tensors of any layout, on their device."""
    # hooks on saved tensors may return them in another layout
    q, k, v, u, out = [copyable_by_tile(x) for x in saved[:5]]
    lse, coeffs, mask, seed = saved[5:]
    saved = Saved(q, k, v, u, out, lse, coeffs.contiguous(), mask, seed)
    with on_device_of(q):
        return path.backward(copyable_by_tile(g), saved, options)
