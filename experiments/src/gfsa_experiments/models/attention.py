"""The attention of these models, and their block.

Each class of attention defines its map A, one common forward applies it. A filter that
:func:`gfsa.plug` adds becomes the child ``gfsa``, and the forward calls it. Without a filter,
attention is ``A·v``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from gfsa.filters import GraphFilter
from gfsa.operators import AttentionOperator, Operator
from gfsa.operators.call import autocast, no_autocast
from gfsa.plugs import Adapter, register_adapter


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
        dropout = self.dropout if self.training else 0.0
        if self.plugged is None:
            # exactly torch's own attention
            return AttentionOperator(q, k, mask, dropout, backend="sdpa")
        return AttentionOperator(q, k, mask, dropout, dropout_after=self.plugged.dropout_after)


class Block(nn.Module):
    r"""A pre-norm Transformer block: :math:`x ← x + f(\mathrm{LN}\,x)`, f attention, then MLP.

    ``dropout`` acts on the output of both branches, ``mlp_dropout`` inside the MLP.
    """

    def __init__(
        self,
        attention: SelfAttention,
        dim: int,
        ffn_dim: int,
        dropout: float = 0.0,
        mlp_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = attention
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, ffn_dim),
            nn.GELU(),
            nn.Dropout(mlp_dropout),
            nn.Linear(ffn_dim, dim),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, *graph: Tensor | None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), *graph))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


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
