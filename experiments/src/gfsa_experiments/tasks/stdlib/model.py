"""A small decoder over bytes, of torch alone: RMSNorm, RoPE, normalised queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gfsa.operators import AttentionOperator, Operator
from gfsa_experiments.models.attention import SoftmaxAttention
from gfsa_experiments.tasks.stdlib.data import BYTES


class CausalAttention(SoftmaxAttention):
    r"""Causal attention over normalised, rotated queries and keys, with a temperature per head.

    .. math:: A_h = \mathrm{softmax}_{causal}(t_h\, R\,\hat q_h\,(R\,\hat k_h)^\top / \sqrt d),
              \qquad \hat x = x / \sqrt{\operatorname{mean}(x^2) + ε}

    R rotates by position (RoPE), t is learned and one in the beginning.

    Args:
        dim: width of the tokens.
        num_heads: a divisor of ``dim``.
        block: the longest sequence.
    """

    cosine: Tensor
    sine: Tensor

    def __init__(self, dim: int, num_heads: int, block: int) -> None:
        super().__init__(dim, num_heads)
        half = dim // num_heads // 2
        angles = torch.arange(block)[:, None] * 10_000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)
        self.temperature = nn.Parameter(torch.ones(num_heads))

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, normalised and rotated, and values: ``(B, H, N, d)`` each."""
        q, k, v = super().heads(x)
        q, k = (self._rotated(_normalised(part)) for part in (q, k))
        return q * self.temperature[:, None, None], k, v

    def operator(self, q: Tensor, k: Tensor, *graph: Tensor | None) -> Operator:
        # without a filter this is exactly torch's own attention
        if self.plugged is None:
            return AttentionOperator(q, k, is_causal=True, backend="sdpa")
        return AttentionOperator(q, k, is_causal=True)

    def _rotated(self, x: Tensor) -> Tensor:
        cosine, sine = self.cosine[: x.shape[-2]], self.sine[: x.shape[-2]]
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


def _normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class DecoderBlock(nn.Module):
    """``x ← x + attention(norm(x))``, then the same with an MLP four times as wide."""

    def __init__(self, width: int, heads: int, block: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = CausalAttention(width, heads, block)
        self.mlp_norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        update: Tensor = self.down(F.gelu(self.up(self.mlp_norm(x))))
        return x + update


class ByteDecoder(nn.Module):
    """Predicts the next byte; the head has the weights of the embedding.

    Args:
        depth: attention layers.
        width: of the tokens.
        heads: attention heads per layer.
        block: the longest sequence.
        init_std: standard deviation of the random weights.
    """

    def __init__(self, depth: int, width: int, heads: int, block: int, init_std: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, width)
        self.blocks = nn.ModuleList(DecoderBlock(width, heads, block) for _ in range(depth))
        self.norm = nn.RMSNorm(width)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=init_std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def tokens(self, ids: Tensor) -> list[Tensor]:
        """The tokens ``(B, N, width)`` that enter the first block and leave each block."""
        states = [self.embed(ids)]
        for block in self.blocks:
            states.append(block(states[-1]))
        return states

    def forward(self, ids: Tensor) -> Tensor:
        """Logits ``(B, N, 256)``."""
        return F.linear(self.norm(self.tokens(ids)[-1]), self.embed.weight)
