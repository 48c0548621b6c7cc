"""GPS and Graph-ViT on padded graphs, with batch norms that ignore padding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import GINEConv, GPSConv, ResGatedGraphConv

from gfsa_experiments.baselines.blocks import GPS_BLOCK, register_block
from gfsa_experiments.models.graph_vit import GraphViT, GraphViTBatch
from gfsa_experiments.models.graphs import Batch, FeatureEncoder


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


@dataclass
class GPSBatch(Batch):
    """B graphs, padded to N nodes.

    ``x``: ``(B, N, F)``; ``padding``: ``(B, N)``, True where there is no node; ``edge_index``:
    ``(2, E)``, nodes counted through all B·N; ``edge_attr``: ``(E, F)``; ``encoding``:
    ``(B, N, k)`` or None; ``values``: ``(B, k)``, the frequencies of eigenvectors, or None.
    Padding edges lead from padding to padding.
    """

    x: Tensor
    padding: Tensor
    edge_index: Tensor
    edge_attr: Tensor
    encoding: Tensor | None
    values: Tensor | None

    def __len__(self) -> int:
        return len(self.x)


class DenseGPSConv(GPSConv):
    r"""PyG's ``GPSConv`` on graphs of one padded size.

    .. math:: h = \mathrm{BN}(x + \mathrm{MPNN}(x)) + \mathrm{BN}(x + \mathrm{MHA}(x)), \qquad
              y = \mathrm{BN}(h + \mathrm{MLP}(h))

    The same modules, and the same outputs for real nodes. ``GPSConv`` reads the size of the largest
    graph from the GPU and gathers the real nodes from the padded ones, twice per layer; here the
    rows stay padded.
    """

    def forward(self, x: Tensor, edge_index: Tensor, padding: Tensor, **kwargs: Any) -> Tensor:
        """``x``: ``(B, N, channels)``; ``padding``: ``(B, N)``."""
        rows = x.flatten(0, 1)
        local = self.conv(rows, edge_index, **kwargs)
        local = self.norm1(rows + F.dropout(local, self.dropout, self.training))
        attended, _ = self.attn(x, x, x, key_padding_mask=padding, need_weights=False)
        attended = F.dropout(attended.flatten(0, 1), self.dropout, self.training)
        h = local + self.norm2(rows + attended)
        return self.norm3(h + self.mlp(h)).view_as(x)


# the comparison methods find its branches where GPSConv has them
register_block(DenseGPSConv, GPS_BLOCK)


class WalkFeatures(nn.Module):
    """Random-walk encodings to vectors: batch norm, then a linear layer."""

    def __init__(self, steps: int, dim: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(steps)
        self.linear = nn.Linear(steps, dim)

    def forward(self, batch: GPSBatch) -> Tensor:
        """``(B, N, dim)``."""
        assert batch.encoding is not None
        rows = self.norm(batch.encoding.flatten(0, 1))
        return self.linear(rows).view(*batch.padding.shape, -1)


class LaplacianFeatures(nn.Module):
    r"""Eigenvectors to vectors, :math:`\sum_k \mathrm{MLP}(v_{ik}, λ_k)`.

    In training the sign of each eigenvector is random, since it is arbitrary.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(2, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim), nn.ReLU()
        )

    def forward(self, batch: GPSBatch) -> Tensor:
        """``(B, N, dim)``."""
        assert batch.encoding is not None
        assert batch.values is not None
        vectors, values = batch.encoding, batch.values[:, None]
        if self.training:
            vectors = vectors * (torch.rand_like(values) < 0.5).to(vectors.dtype).mul(2).sub(1)
        pairs = torch.stack([vectors, values.expand_as(vectors)], -1)
        # small graphs have fewer frequencies: missing ones are marked by -1
        return (self.mlp(pairs) * (values >= 0)[..., None]).sum(2)


class GPS(nn.Module):
    """GPS for properties of whole graphs.

    Args:
        node_features, edge_features: sizes of the vocabularies, one per integer column, or the
            number of real columns.
        num_outputs: numbers predicted for a graph.
        dim, depth, num_heads: the layers' sizes.
        local: message passing, ``gine`` or ``gated``.
        encoding: ``walk``, ``laplacian`` or ``none``.
        encoding_size: random-walk steps or eigenvectors.
        encoding_dim: the part of ``dim`` that the encoding takes.
        dropout: on the branches of the layers and in their MLPs.
        attention_dropout: on entries of A.
        pooling: ``sum`` or ``mean`` over nodes.
    """

    def __init__(
        self,
        node_features: int | Sequence[int],
        edge_features: int | Sequence[int],
        num_outputs: int,
        *,
        dim: int,
        depth: int,
        num_heads: int,
        local: str,
        encoding: str,
        encoding_size: int,
        encoding_dim: int,
        dropout: float,
        attention_dropout: float,
        pooling: str,
    ) -> None:
        super().__init__()
        self.pooling = pooling
        self.encoding: nn.Module | None = None
        if encoding == "walk":
            self.encoding = WalkFeatures(encoding_size, encoding_dim)
        elif encoding == "laplacian":
            self.encoding = LaplacianFeatures(encoding_dim)
        self.nodes = FeatureEncoder(
            node_features, dim if self.encoding is None else dim - encoding_dim
        )
        self.edges = FeatureEncoder(edge_features, dim)
        self.layers = nn.ModuleList(
            DenseGPSConv(
                dim,
                _local(local, dim),
                heads=num_heads,
                dropout=dropout,
                attn_kwargs={"dropout": attention_dropout},
            )
            for _ in range(depth)
        )
        self.head = nn.Sequential(
            nn.Linear(dim, dim // 2),
            nn.ReLU(),
            nn.Linear(dim // 2, dim // 4),
            nn.ReLU(),
            nn.Linear(dim // 4, num_outputs),
        )
        self._norms = mask_norms(self)

    def forward(self, batch: GPSBatch) -> Tensor:
        """``(B, num_outputs)``."""
        real = ~batch.padding
        with real_rows((self._norms, real.flatten())):
            x = self.nodes(batch.x)
            if self.encoding is not None:
                x = torch.cat([x, self.encoding(batch).to(x.dtype)], -1)
            edges = self.edges(batch.edge_attr)
            for layer in self.layers:
                x = layer(x, batch.edge_index, batch.padding, edge_attr=edges)
        x = (x * real[..., None]).sum(1)
        if self.pooling == "mean":
            x = x / real.sum(1, keepdim=True)
        return self.head(x)


def _local(kind: str, dim: int) -> nn.Module:
    if kind == "gine":
        return GINEConv(nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim)))
    return ResGatedGraphConv(dim, dim, edge_dim=dim)


@dataclass
class PaddedPatches(GraphViTBatch):
    """A :class:`~gfsa_experiments.models.GraphViTBatch` with padding nodes and padding copies.

    ``real_nodes``: ``(N,)`` and ``real_copies``: ``(C,)`` are False for padding; ``padding`` marks
    the patches.
    """

    real_nodes: Tensor
    real_copies: Tensor


class PaddedGraphViT(GraphViT):
    """:class:`~gfsa_experiments.models.GraphViT` whose batch norms ignore padding."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._node_norms = mask_norms(self.walk)
        self._copy_norms = mask_norms(self.gnn)
        self._patch_norms = mask_norms(self.patch_to_node) + mask_norms(self.patch_walk)

    def forward(self, batch: GraphViTBatch) -> Tensor:
        """``(B, num_outputs)``."""
        assert isinstance(batch, PaddedPatches)
        with real_rows(
            (self._node_norms, batch.real_nodes),
            (self._copy_norms, batch.real_copies),
            (self._patch_norms, ~batch.padding.flatten()),
        ):
            return super().forward(batch)
