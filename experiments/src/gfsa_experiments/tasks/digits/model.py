"""A small, deep Vision Transformer with a place for a graph filter in every attention layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gfsa
from gfsa.operators import AttentionOperator
from gfsa.plugs.adapter import SwapClass
from gfsa_experiments.tasks.digits.data import CLASSES, IMAGE_SIDE

PATCH = 2
FilterFactory = Callable[[int], gfsa.GraphFilter]


class Attention(nn.Module):
    """Multi-head self-attention, ``A·V`` per head."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed: Tensor = self.out(self.attend(q, k, v).transpose(1, 2).flatten(-2))
        return mixed


class FilteredAttention(Attention):
    """The same with a filter, ``Σ_k c_k A^k V``: what a plugged :class:`Attention` becomes."""

    gfsa: gfsa.GraphFilter

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        filtered: Tensor = self.gfsa(AttentionOperator(q, k), v)
        return filtered


# all that gfsa has to be told about an attention of one's own
gfsa.register_adapter(Attention, SwapClass(FilteredAttention, "heads"))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each normalised first and added to what came in."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class DigitsViT(nn.Module):
    """A Vision Transformer for 8×8 images: 16 tokens of 2×2 pixels, and a class token that decides.

    Args:
        depth: attention layers.
        dim: width.
        heads: attention heads a layer.
        make_filter: called with ``heads`` for each layer; ``None`` is ordinary attention. Filters
            draw no random numbers, so under one seed all variants start from the same weights.
    """

    def __init__(
        self,
        depth: int = 12,
        dim: int = 48,
        heads: int = 4,
        make_filter: FilterFactory | None = None,
    ) -> None:
        super().__init__()
        patches = (IMAGE_SIDE // PATCH) ** 2
        self.embed = nn.Linear(PATCH**2, dim)
        # of the size of the embeddings: a position ten times smaller is learned ten times slower
        self.position = nn.Parameter(0.5 * torch.randn(patches, dim))
        self.class_token = nn.Parameter(0.5 * torch.randn(1, 1, dim))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, CLASSES)
        if make_filter is not None:
            gfsa.plug(self, filter=make_filter)

    def tokens(self, images: Tensor) -> list[Tensor]:
        """The tokens ``(B, 17, dim)`` that enter the first block and leave each block."""
        patches = images.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH)
        x = self.embed(patches.flatten(3).flatten(1, 2)) + self.position
        states = [torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1)]
        for block in self.blocks:
            states.append(block(states[-1]))
        return states

    def classify(self, tokens: Tensor) -> Tensor:
        """Logits ``(B, 10)`` from the tokens that leave the last block."""
        logits: Tensor = self.head(self.norm(tokens[:, 0]))
        return logits

    def forward(self, images: Tensor) -> Tensor:
        return self.classify(self.tokens(images)[-1])
