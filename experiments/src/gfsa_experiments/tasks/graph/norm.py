"""Batch normalisation that ignores the padding rows of a batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Rows(NamedTuple):
    """Which rows of a padded batch are real."""

    share: Tensor
    """``(rows,)``: one over the number of real rows, zero for padding."""
    padding: Tensor
    """``(rows, 1)``: True for padding."""
    unbias: Tensor
    """n / (n - 1) for n real rows: the factor from the variance to its unbiased estimate."""


class _Normalise(torch.autograd.Function):
    r"""y = w·x̂ + b with x̂ = (x − μ)/σ; the closed-form gradient needs half of the kernels.

    .. math:: dx_i = \frac{w}{σ} \Bigl(g_i - s_i \bigl(\textstyle\sum_j g_j
              + \hat x_i \sum_j g_j \hat x_j\bigr)\Bigr)
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, rows: Rows, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        mean = rows.share @ x
        centred = x - mean
        variance = rows.share @ centred.square()
        rsigma = torch.rsqrt(variance + eps)
        # no in-place operations: compiled by torch 2.11, results of them get a gradient of zero
        normed = centred * rsigma
        y = torch.addcmul(bias, normed, weight).masked_fill(rows.padding, 0.0)
        ctx.save_for_backward(normed, rsigma, weight, rows.share, rows.padding)
        ctx.mark_non_differentiable(mean, variance)
        ctx.set_materialize_grads(False)
        return y, mean, variance

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor, *unused: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        normed, rsigma, weight, share, padding = ctx.saved_tensors
        grad = grad.masked_fill(padding, 0.0)
        d_bias, d_weight = grad.sum(0), (grad * normed).sum(0)
        common = torch.addcmul(d_bias, normed, d_weight)
        d_x = torch.addcmul(grad, share[:, None], common, value=-1.0)
        return d_x.mul_(rsigma * weight), d_weight, d_bias, None, None


class MaskedBatchNorm(nn.BatchNorm1d):
    r"""``nn.BatchNorm1d`` over the real rows; padding rows become zero.

    .. math:: μ = \sum_i s_i x_i, \qquad σ^2 = \sum_i s_i (x_i - μ)^2

    with :math:`s_i` one over the number of real rows, and zero for padding. :func:`real_rows` sets
    which rows are real; no operation depends on their number, so that a step can be replayed as a
    CUDA graph. Padding is reset to zero because it would grow from layer to layer otherwise
    (padding edges lead from padding to padding) until it overflows.
    """

    rows: Rows | None = None

    def forward(self, x: Tensor) -> Tensor:
        """``(rows, features)``."""
        if self.rows is None:
            return super().forward(x)
        if not self.training:
            return super().forward(x).masked_fill(self.rows.padding, 0.0)
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        with torch.autocast(x.device.type, enabled=False):
            y, mean, variance = _Normalise.apply(
                x.float(), self.weight, self.bias, self.rows, self.eps
            )
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * self.rows.unbias, self.momentum)
            self.num_batches_tracked.add_(1)
        return y.to(x.dtype)


def mask_norms(module: nn.Module) -> list[MaskedBatchNorm]:
    """Replace every batch norm in ``module`` by a masked one, in place, and return them."""
    norms = []
    for child in module.modules():
        if type(child) is nn.BatchNorm1d:
            child.__class__ = MaskedBatchNorm
        if isinstance(child, MaskedBatchNorm):
            norms.append(child)
    return norms


@contextmanager
def real_rows(*groups: tuple[Iterable[MaskedBatchNorm], Tensor]) -> Iterator[None]:
    """A context in which each group of norms uses the rows where its mask, ``(rows,)``, is True."""
    changed = []
    try:
        for norms, mask in groups:
            count = mask.sum()
            rows = Rows(mask / count, ~mask[:, None], count / (count - 1).clamp(min=1))
            for norm in norms:
                norm.rows = rows
                changed.append(norm)
        yield
    finally:
        for norm in changed:
            norm.rows = None
