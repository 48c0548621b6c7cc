"""Layers that graph models share: features to vectors, and means over groups."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gfsa.operators.base import at_least_float32


class FeatureEncoder(nn.Module):
    r"""Node or edge features to vectors.

    .. math:: \textstyle\sum_c \mathrm{table}_c[x_c] \quad\text{or}\quad W x + b

    Args:
        features: sizes of the vocabularies, one for each integer column; or the number of real
            columns.
        dim: width of the vectors.
    """

    def __init__(self, features: int | Sequence[int], dim: int) -> None:
        super().__init__()
        self.features = features if isinstance(features, int) else tuple(features)
        self.dim = dim
        if isinstance(self.features, int):
            self.linear = nn.Linear(self.features, dim)
        else:
            self.tables = nn.ModuleList(nn.Embedding(size, dim) for size in self.features)

    def forward(self, x: Tensor) -> Tensor:
        """``(..., columns)`` to ``(..., dim)``."""
        integers = not isinstance(self.features, int)
        columns = len(self.features) if isinstance(self.features, tuple) else self.features
        if x.shape[-1] != columns or integers == x.is_floating_point():
            kind = "integer" if integers else "floating-point"
            raise ValueError(
                f"expected {columns} {kind} columns of features, "
                f"got {x.shape[-1]} of {x.dtype}; pass the model the sizes of its vocabularies, "
                "or the number of real columns"
            )
        if not integers:
            return self.linear(x.to(self.linear.weight.dtype))
        vectors = [table(x[..., column]) for column, table in enumerate(self.tables)]
        return torch.stack(vectors).sum(0) if len(vectors) > 1 else vectors[0]


def mean_by(index: Tensor, x: Tensor, size: int) -> Tensor:
    """``(size, ...)``: the mean of the rows of ``x`` that share an index; zeros without rows."""
    # sums of many half-precision rows are accumulated in float32
    dtype = at_least_float32(x.dtype)
    total = torch.zeros(size, *x.shape[1:], dtype=dtype, device=x.device)
    total = total.index_add(0, index, x.to(dtype))
    count = torch.zeros(size, dtype=dtype, device=x.device)
    count = count.index_add(0, index, torch.ones_like(index, dtype=dtype)).clamp(min=1.0)
    return (total / count.view(-1, *[1] * (x.dim() - 1))).to(x.dtype)
