"""AttnScale: more of what an attention map does beyond averaging."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gfsa.baselines.forward_state import Scope
from gfsa.baselines.map_methods import BaselineFilter
from gfsa.operators import DenseOperator, Operator
from gfsa.operators.dense import repeat_heads
from gfsa.operators.visibility import Visibility


class AttnScale(BaselineFilter):
    r"""AttnScale (Wang et al., 2022): scale the high-pass part of the map, head by head.

    .. math:: H = M + (1 + λ)(A - M), \qquad y = A v + λ\,(A v - M v)

    M takes the mean over the keys that a query sees: all of them, those before it in a causal
    model, never padding. It is a mean of tokens here (a running one, if causal), not an n×n
    matrix. λ = 0 at first: ordinary attention, exactly.

    Attention dropout acts on A, not on M; the published code drops entries of H.

    Args:
        num_heads: one λ each.
        lr_multiplier: λ is ``lr_multiplier·θ``; see :class:`gfsa.GraphFilter`.
    """

    def __init__(self, num_heads: int, lr_multiplier: float = 1.0) -> None:
        # θ multiplies what is no polynomial of A: it is applied in forward
        nothing = torch.zeros(1, 2, dtype=torch.float64, device="cpu")
        super().__init__(num_heads, nothing, lr_multiplier)
        #: what the layer sees, where the layer's own masks are read; else the operator tells
        self.scope: Scope | None = None

    def forward(self, operator: Operator, v: Tensor) -> Tensor:
        """``v`` of shape ``(B, H, N, D)`` to ``A·v + λ(A·v − M·v)``."""
        self.check_dropout_place()
        _, mixed = operator.powers(v, 1)
        mean = repeat_heads(self._sight(operator).mean(v, mixed.shape[-2]), mixed)
        y = mixed + self._lambda() * (mixed - mean)
        return y.to(mixed.dtype)

    def map(self, operator: DenseOperator) -> Tensor:
        matrix = operator.dense()
        return matrix + self._lambda() * (
            matrix - self._sight(operator).dense(matrix.shape[-1], matrix)
        )

    def config(self) -> dict[str, Any]:
        return {**super().config(), "lr_multiplier": self.lr_multiplier}

    def _lambda(self) -> Tensor:
        assert self.theta is not None
        return (self.lr_multiplier * self.theta)[..., None]

    def _sight(self, operator: Operator) -> Visibility:
        if self.scope is not None:
            return self.scope.sight
        visible = operator.visibility()
        if visible is None:
            raise TypeError(
                f"which keys a query sees cannot be read from a {type(operator).__name__}: "
                "gfsa.baselines.apply(model, 'attnscale') reads the layer's masks instead"
            )
        return visible
