"""Batch normalisation of padded batches: rows that are padding do not count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Rows(NamedTuple):
    """Which rows of a padded batch are real."""

    share: Tensor
    """``(rows,)``: one over the number of real rows; zero for padding."""
    padding: Tensor
    """``(rows, 1)``: True where there is nothing."""


class MaskedBatchNorm(nn.BatchNorm1d):
    r"""``nn.BatchNorm1d`` over the rows that are real; those that are padding become zero.

    .. math:: μ = \sum_i s_i x_i, \qquad σ^2 = \sum_i s_i (x_i - μ)^2

    with :math:`s_i` one over the number of real rows, and zero for padding. Which rows are real is
    said by :func:`real_rows`; no operation here depends on how many there are, so that a step can
    be replayed as a CUDA graph. Were padding not kept at zero, it would grow from layer to layer
    (all edges that fill up a batch meet in one node) until it overflows.
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
        share = self.rows.share
        with torch.autocast(x.device.type, enabled=False):
            values = x.float()
            mean = share @ values
            centred = values - mean
            variance = share @ centred.square()
            with torch.no_grad():
                # the running variance is the unbiased one: count / (count - 1)
                unbiased = variance / (1.0 - share.max()).clamp(min=1e-6)
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(unbiased, self.momentum)
                self.num_batches_tracked.add_(1)
            scale = torch.rsqrt(variance + self.eps) * self.weight
            normed = torch.addcmul(self.bias, centred, scale)
            return normed.masked_fill(self.rows.padding, 0.0).to(x.dtype)


def mask_norms(module: nn.Module) -> list[MaskedBatchNorm]:
    """Make every batch norm in ``module`` a masked one, in place, and give them."""
    norms = []
    for child in module.modules():
        if type(child) is nn.BatchNorm1d:
            child.__class__ = MaskedBatchNorm
        if isinstance(child, MaskedBatchNorm):
            norms.append(child)
    return norms


@contextmanager
def real_rows(*groups: tuple[Iterable[MaskedBatchNorm], Tensor]) -> Iterator[None]:
    """Within it, each group of norms counts the rows where its mask, ``(rows,)``, is True."""
    told = []
    try:
        for norms, mask in groups:
            share = mask.float()
            rows = Rows(share / share.sum(), ~mask[:, None])
            for norm in norms:
                norm.rows = rows
                told.append(norm)
        yield
    finally:
        for norm in told:
            norm.rows = None
