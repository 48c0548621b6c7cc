"""A small encoder with attention of its own, and its adapter."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gfsa.operators import AttentionOperator
from gfsa.plugs import SwapClass, register_adapter


class TinyAttention(nn.Module):
    def __init__(self, dim: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def project(self, x: Tensor, mask: Tensor | None) -> tuple[list[Tensor], Tensor | None]:
        parts = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return list(parts), None if mask is None else mask.bool()[:, None, None, :]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        (q, k, v), keys = self.project(x, mask)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=keys, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(-2))


class FilteredTinyAttention(TinyAttention):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        (q, k, v), keys = self.project(x, mask)
        y = self.gfsa(AttentionOperator(q, k, keys, is_causal=self.causal), v)
        return self.out(y.transpose(1, 2).flatten(-2))


class UnknownAttention(nn.Module):
    """Attention that no adapter knows."""

    def __init__(self, dim: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.num_heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).movedim((-3, -2), (0, 2))
        return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)


class TinyBlock(nn.Module):
    def __init__(self, dim: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = TinyAttention(dim, heads, causal)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


class TinyEncoder(nn.Module):
    """``tokens (B, N, dim)`` and an ``attention_mask (B, N)`` in, a class out.

    Args:
        shared: one block at every depth, as in ALBERT.
    """

    def __init__(
        self,
        depth: int = 3,
        dim: int = 16,
        heads: int = 4,
        causal: bool = False,
        shared: bool = False,
    ) -> None:
        super().__init__()
        self.turns = depth if shared else 1
        count = 1 if shared else depth
        self.blocks = nn.ModuleList(TinyBlock(dim, heads, causal) for _ in range(count))
        self.head = nn.Linear(dim, 2)

    def states(self, tokens: Tensor, attention_mask: Tensor | None = None) -> list[Tensor]:
        """What enters the first block and leaves each block."""
        states = [tokens]
        for _ in range(self.turns):
            for block in self.blocks:
                states.append(block(states[-1], attention_mask))
        return states

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        last = self.states(tokens, attention_mask)[-1]
        if attention_mask is None:
            return self.head(last.mean(1))
        keep = attention_mask.to(last.dtype)[..., None]
        return self.head((last * keep).sum(1) / keep.sum(1))


register_adapter(TinyAttention, SwapClass(FilteredTinyAttention, "heads"))


def padded_batch(lengths: list[int], dim: int = 16) -> dict[str, Tensor]:
    """Random tokens, padded on the right with large numbers."""
    most = max(lengths)
    mask = torch.arange(most) < torch.tensor(lengths)[:, None]
    tokens = torch.randn(len(lengths), most, dim)
    tokens[~mask] = 1e3
    return {"tokens": tokens, "attention_mask": mask.long()}
