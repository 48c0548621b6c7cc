"""A small encoder of sequences of our own blocks, by softmax or by a map that is linear in N."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gfsa.operators import LinearOperator
from gfsa_experiments.models.attention import Block, SelfAttention, SoftmaxAttention


class EfficientAttention(SelfAttention):
    """A caller's own attention; ``padding``, ``(B, N)``, is True where a token is padding."""

    def operator(self, q: Tensor, k: Tensor, *graph: Tensor | None) -> LinearOperator:
        (padding,) = graph or (None,)
        return LinearOperator(q, k, padding)


class Encoder(nn.Module):
    """Classifies sequences by the vector of a CLS token."""

    def __init__(
        self, vocabulary: int, kind: type[SelfAttention] = SoftmaxAttention, *, dim: int = 12,
        depth: int = 2, num_heads: int = 3, ffn_dim: int = 20, dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.cls = nn.Parameter(torch.randn(dim))
        self.blocks = nn.ModuleList(
            Block(kind(dim, num_heads), dim, ffn_dim, dropout) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 5)

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        x = self.tokens(tokens)
        x = torch.cat([self.cls.to(x.dtype).expand(len(x), 1, -1), x], dim=1)
        if padding is not None:
            padding = F.pad(padding, (1, 0), value=False)
            if isinstance(self.blocks[0].attention, SoftmaxAttention):  # type: ignore[union-attr]
                padding = ~padding[:, None, None, :]
        for block in self.blocks:
            x = block(x, padding)
        return self.head(self.norm(x[:, 0]))
