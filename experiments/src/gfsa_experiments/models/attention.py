"""The attention of these models, their block, and a plain encoder of sequences.

Each class of attention defines its map A, one common forward applies it. A filter that
:func:`gfsa.plug` adds becomes the child ``gfsa``, and the forward calls it. Without a filter,
attention is ``A·v``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gfsa.filters import GraphFilter
from gfsa.operators import AttentionOperator, DenseOperator, LinearOperator, Operator
from gfsa.operators.call import DropoutPlace, autocast, no_autocast
from gfsa.plugs import Adapter, register_adapter

Attention = Literal["softmax", "efficient"]


class SelfAttention(nn.Module, ABC):
    r"""Multi-head self-attention over a map that a subclass defines.

    .. math:: y = W_o\,\mathrm{concat}_h(A_h\,v_h) + b_o,
              \qquad q, k, v = W_{qkv}\,x + b_{qkv}

    and with a filter plugged, :math:`\sum_k c_{h,k} A_h^k v_h` in place of :math:`A_h v_h`.

    Args:
        dim: width of the tokens.
        num_heads: a divisor of ``dim``.
        dropout: probability of dropping an entry of A while training.
    """

    def __init__(self, dim: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"dim must be a multiple of num_heads, got {dim} and {num_heads}")
        self.num_heads = num_heads
        self.dropout = dropout
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    @abstractmethod
    def operator(self, q: Tensor, k: Tensor, *graph: Tensor | None) -> Operator:
        """The map A of these queries and keys, ``(B, H, N, d)`` each."""

    @property
    def plugged(self) -> GraphFilter | None:
        """The filter, or None."""
        return getattr(self, "gfsa", None)

    def forward(self, x: Tensor, *graph: Tensor | None) -> Tensor:
        """Tokens ``(B, N, dim)`` to tokens; ``graph`` holds the other inputs of the map."""
        return self.merge(self.attend(*self.heads(x), *graph))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *graph: Tensor | None) -> Tensor:
        """The map on the values, or its polynomial if a filter is plugged: ``(B, H, N, d)``."""
        # operators compute maps and sums in float32: autocast casts here, and not inside them
        q, k, v = autocast(q, k, v)
        with no_autocast(q.device):
            return self._mixed(q, k, v, *graph)

    def _mixed(self, q: Tensor, k: Tensor, v: Tensor, *graph: Tensor | None) -> Tensor:
        operator = self.operator(q, k, *graph)
        return operator.apply(v) if self.plugged is None else self.plugged(operator, v)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, ``(B, H, N, d)`` each."""
        batch, length, dim = x.shape
        shape = (batch, length, 3, self.num_heads, dim // self.num_heads)
        q, k, v = self.qkv(x).reshape(shape).permute(2, 0, 3, 1, 4)
        return q, k, v

    def merge(self, y: Tensor) -> Tensor:
        """Heads ``(B, H, N, d)`` back to tokens ``(B, N, dim)``."""
        return self.out(y.transpose(1, 2).flatten(2))

    def drop(self) -> tuple[float, DropoutPlace]:
        """The current probability of attention dropout, and where it acts."""
        place = "attention" if self.plugged is None else self.plugged.dropout_after
        return (self.dropout if self.training else 0.0), place


class SoftmaxAttention(SelfAttention):
    r""":math:`A = \mathrm{softmax}(q k^\top / \sqrt d + \mathrm{mask})`.

    The mask is bool (True takes part) or an additive bias, broadcastable to ``(B, H, N, N)``; a
    learned bias gets gradients from every pass of a filter.
    """

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *graph: Tensor | None) -> Tensor:
        # this operator handles autocast itself, including the mask
        return self._mixed(q, k, v, *graph)

    def operator(self, q: Tensor, k: Tensor, *graph: Tensor | None) -> Operator:
        (mask,) = graph or (None,)
        dropout, place = self.drop()
        return AttentionOperator(
            q,
            k,
            mask,
            dropout,
            # without a filter this is exactly torch's own attention
            backend="sdpa" if self.plugged is None else "auto",
            dropout_after=place,
        )


class HadamardAttention(SelfAttention):
    r"""Graph-ViT's attention, :math:`A = \mathrm{softmax}(q k^\top / \sqrt d) ∘ \tilde A`.

    The adjacency :math:`\tilde A` of the patches, ``(B, N, N)``, is multiplied after the softmax,
    so the rows of A do not sum to one. ``padding``, ``(B, N)``, is True where there is no patch.
    """

    def operator(self, q: Tensor, k: Tensor, *graph: Any) -> Operator:
        padding, adjacency = graph
        dropout, place = self.drop()
        return DenseOperator.from_qk(
            q,
            k,
            attn_mask=~padding[:, None, None, :],
            multiplier=adjacency[:, None],
            dropout_p=dropout,
            dropout_after=place,
        )


class EfficientAttention(SelfAttention):
    r"""Efficient Attention, :math:`A = ρ_{row}(q)\,ρ_{col}(k)^\top`: linear in N.

    ``padding``, ``(B, N)`` or None, is True where a token is padding.
    """

    def __init__(self, dim: int, num_heads: int, dropout: float = 0.0) -> None:
        if dropout:
            raise ValueError(
                "efficient attention never builds the map whose entries attention dropout would "
                f"drop: leave it at 0, got {dropout}"
            )
        super().__init__(dim, num_heads)

    def operator(self, q: Tensor, k: Tensor, *graph: Tensor | None) -> Operator:
        (padding,) = graph or (None,)
        return LinearOperator(q, k, padding)


class Block(nn.Module):
    r"""A pre-norm Transformer block: :math:`x ← x + f(\mathrm{LN}\,x)`, f attention, then MLP.

    ``dropout`` acts on the output of both branches; ``mlp_dropout``, inside the MLP, is the same by
    default.
    """

    def __init__(
        self,
        attention: SelfAttention,
        dim: int,
        ffn_dim: int,
        dropout: float = 0.0,
        mlp_dropout: float | None = None,
        activation: type[nn.Module] = nn.GELU,
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = attention
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, ffn_dim),
            activation(),
            nn.Dropout(dropout if mlp_dropout is None else mlp_dropout),
            nn.Linear(ffn_dim, dim),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, *graph: Tensor | None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), *graph))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class Encoder(nn.Module):
    r"""Classifies a sequence of tokens by the vector of a CLS token, as the Long Range Arena does.

    .. math:: x_0 = \mathrm{cls} + p_0, \quad x_i = \mathrm{table}[t_i] + p_i, \qquad
              y = W_2\,\mathrm{ReLU}(W_1\,\mathrm{LN}(x_0^{(L)}))

    with L pre-norm blocks and learned positions p.

    Args:
        vocabulary, num_classes: numbers of different tokens and of outputs.
        max_length: the longest sequence, CLS not counted.
        attention: ``"softmax"``, or ``"efficient"``, which is linear in the length.
        dim, depth, num_heads, ffn_dim: sizes; the defaults are the benchmark's.
        dropout: on embeddings and branches.
        attention_dropout: on entries of the attention map (none with ``"efficient"``).
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
    ) -> None:
        super().__init__()
        if attention not in get_args(Attention):
            raise ValueError(f"attention must be one of {get_args(Attention)}, got {attention!r}")
        kind = SoftmaxAttention if attention == "softmax" else EfficientAttention
        sizes = dim, num_heads, attention_dropout
        self.attention = attention
        self.max_length = max_length
        self.tokens = nn.Embedding(vocabulary, dim)
        self.positions = nn.Parameter(torch.empty(max_length + 1, dim))
        self.cls = nn.Parameter(torch.empty(dim))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(kind(*sizes), dim, ffn_dim, dropout) for _ in range(depth)
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
                f"a row of {length} tokens is longer than max_length={self.max_length}"
            )
        if padding is not None and (padding.dtype != torch.bool or padding.shape != tokens.shape):
            raise ValueError(
                f"expected a bool padding of shape {tuple(tokens.shape)}, True for padding, "
                f"got {padding.dtype} of shape {tuple(padding.shape)}"
            )
        x = self.tokens(tokens)
        x = torch.cat([self.cls.to(x.dtype).expand(batch, 1, -1), x], dim=1)
        x = self.dropout(x + self.positions[: length + 1].to(x.dtype))
        if padding is not None:
            padding = F.pad(padding, (1, 0), value=False)
            if self.attention == "softmax":
                padding = ~padding[:, None, None, :]
        for block in self.blocks:
            x = block(x, padding)
        return self.head(self.norm(x[:, 0]))


class OwnAttention(Adapter):
    """Nothing to install: the forward calls the child ``gfsa`` if there is one."""

    how = "gfsa.models"

    def num_heads(self, module: nn.Module) -> int:
        assert isinstance(module, SelfAttention)
        return module.num_heads

    def install(self, module: nn.Module) -> None:
        pass

    def remove(self, module: nn.Module) -> None:
        pass


register_adapter(SelfAttention, OwnAttention())
