"""A plain Transformer encoder for long sequences, as the Long Range Arena compares them."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gfsa_experiments.models.attention import (
    Block,
    EfficientAttention,
    LinformerAttention,
    SelfAttention,
    SoftmaxAttention,
)

Attention = Literal["softmax", "efficient", "linformer"]


class Encoder(nn.Module):
    r"""Classifies a sequence of tokens by the vector of a CLS token.

    .. math:: x_0 = \mathrm{cls} + p_0, \quad x_i = \mathrm{table}[t_i] + p_i, \qquad
              y = W_2\,\mathrm{ReLU}(W_1\,\mathrm{LN}(x_0^{(L)}))

    with L pre-norm blocks and learned positions p.

    Args:
        vocabulary: number of different tokens.
        num_classes: number of outputs.
        max_length: the longest sequence, CLS not counted.
        attention: ``"softmax"``; ``"efficient"``, linear in the length; or ``"linformer"``, a
            reference that takes no filter.
        dim, depth, num_heads, ffn_dim: sizes; the defaults are the benchmark's.
        dropout: on embeddings and branches.
        attention_dropout: on entries of the attention map (none with ``"efficient"``).
        projected: rows that Linformer projects the sequence to.
    """

    def __init__(
        self,
        vocabulary: int,
        num_classes: int,
        max_length: int,
        attention: Attention = "softmax",
        *,
        dim: int = 512,
        depth: int = 4,
        num_heads: int = 8,
        ffn_dim: int = 1024,
        dropout: float = 0.1,
        attention_dropout: float = 0.0,
        projected: int = 256,
    ) -> None:
        super().__init__()
        if attention not in get_args(Attention):
            raise ValueError(f"attention must be one of {get_args(Attention)}, got {attention!r}")

        def build_attention() -> SelfAttention:
            if attention == "softmax":
                return SoftmaxAttention(dim, num_heads, attention_dropout)
            if attention == "efficient":
                return EfficientAttention(dim, num_heads, attention_dropout)
            return LinformerAttention(dim, num_heads, attention_dropout, max_length + 1, projected)

        self.attention = attention
        self.max_length = max_length
        self.tokens = nn.Embedding(vocabulary, dim)
        self.positions = nn.Parameter(torch.empty(max_length + 1, dim))
        self.cls = nn.Parameter(torch.empty(dim))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(build_attention(), dim, ffn_dim, dropout) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Sequential(
            nn.Linear(dim, ffn_dim), nn.ReLU(), nn.Linear(ffn_dim, num_classes)
        )
        for weight in (self.tokens.weight, self.positions, self.cls):
            nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        """``(B, num_classes)``.

        Args:
            tokens: ``(B, N)`` integers.
            padding: ``(B, N)`` bool, True where a token is padding; None if there is none, which
                lets attention run its fastest kernels.
        """
        batch, length = tokens.shape
        if length > self.max_length:
            raise ValueError(
                f"a sequence of {length} tokens is longer than max_length={self.max_length}"
            )
        if padding is not None and (padding.dtype != torch.bool or padding.shape != tokens.shape):
            raise ValueError(
                f"expected a bool padding of shape {tuple(tokens.shape)}, True for padding, "
                f"got {padding.dtype} of shape {tuple(padding.shape)}"
            )
        x = self.tokens(tokens)
        x = torch.cat([self.cls.to(x.dtype).expand(batch, 1, -1), x], dim=1)
        x = self.dropout(x + self.positions[: length + 1].to(x.dtype))
        mask = self.mask(padding)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x[:, 0]))

    def mask(self, padding: Tensor | None) -> Tensor | None:
        """The padding in the form that this encoder's attention expects, with CLS in front."""
        if padding is None:
            return None
        padding = F.pad(padding, (1, 0), value=False)
        return ~padding[:, None, None, :] if self.attention == "softmax" else padding
