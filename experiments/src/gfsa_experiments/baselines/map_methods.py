"""The methods that change the attention map: AttnScale and NeuTRENO."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from gfsa.filters import GraphFilter, Polynomial
from gfsa.filters.checks import check_number
from gfsa.operators import DenseOperator, Operator
from gfsa.operators.base import at_least_float32, repeat_heads
from gfsa.operators.visibility import Visibility
from gfsa_experiments.baselines.forward_state import FirstValues, Scope
from gfsa_experiments.baselines.sight_check import Kind, kind_of, refusal_of_sight


class BaselineFilter(GraphFilter):
    """A method that is plugged like a filter but is not a polynomial of A."""

    is_polynomial = False

    def __init__(
        self, num_heads: int, basis: Tensor | None = None, lr_multiplier: float = 1.0
    ) -> None:
        attention = torch.tensor([0.0, 1.0], dtype=torch.float64, device="cpu")
        super().__init__(num_heads, attention, basis, lr_multiplier=lr_multiplier)

    def coefficients(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} is not a polynomial of the attention map, so it has "
            "no coefficients"
        )

    def fold(self) -> Polynomial:
        return self.coefficients()

    def check_dropout_place(self) -> None:
        """Raise unless dropout acts on A: H is never built, so its entries cannot be dropped."""
        if self.dropout_after != "attention":
            raise ValueError(
                f"{type(self).__name__} drops entries of A; plug(..., dropout_after='attention')"
            )


class AttnScale(BaselineFilter):
    r"""AttnScale (Wang et al., 2022): scale the high-pass part of the map, head by head.

    .. math:: H = M + (1 + λ)(A - M), \qquad y = A v + λ\,(A v - M v)

    M averages the keys that a query sees: all of them, or those up to the query in a causal
    model, without padding. The code averages tokens (a running mean if causal) and builds no n×n
    matrix. λ starts at 0, which is exactly ordinary attention.

    Attention dropout acts on A, not on M; the published code drops entries of H.

    Args:
        num_heads: heads of the layer, each with its own λ.
        lr_multiplier: λ is ``lr_multiplier·θ``; see :class:`gfsa.GraphFilter`.
    """

    def __init__(self, num_heads: int, lr_multiplier: float = 1.0) -> None:
        # λ multiplies a term that is no polynomial of A, so the basis of θ is zero
        zero = torch.zeros(1, 2, dtype=torch.float64, device="cpu")
        super().__init__(num_heads, zero, lr_multiplier)
        #: holds the layer's masks in each forward; None if the operator's masks are used
        self.scope: Scope | None = None
        #: the kinds of masks that were compared with the layer's map; None if there is no need to
        self.compared: set[Kind] | None = None

    def forward(self, operator: Operator, v: Tensor) -> Tensor:
        """``v`` of shape ``(B, H, N, D)`` to ``A·v + λ(A·v − M·v)``."""
        self.check_dropout_place()
        sight = self._sight(operator)
        if self.compared is not None and not torch.compiler.is_compiling():
            self._compare(sight, operator, v)
        _, mixed = operator.powers(v, 1)
        mean = repeat_heads(sight.mean(v, mixed.shape[-2]), mixed)
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

    def _compare(self, sight: Visibility, operator: Operator, v: Tensor) -> None:
        """Raise if the masks that were read are not those of the map; once for each kind."""
        assert self.scope is not None
        assert self.compared is not None
        kind = kind_of(sight)
        if kind in self.compared:
            return
        refusal, decided = refusal_of_sight(sight, operator, v, self.training)
        if refusal is not None:
            raise ValueError(
                f"the masks of {self.scope.name} cannot be read: {refusal}. "
                "gfsa.baselines.remove(model), or leave the layer out with apply(..., layers=...)"
            )
        if decided:
            self.compared.add(kind)

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


class NeuTRENO(BaselineFilter):
    r"""NeuTRENO (Nguyen et al., 2023): attention plus a pull towards the first layer's values.

    .. math:: y = A v + α\,(v^0 - v)

    :math:`v^0` are the values of the model's first layer in the same forward; in that layer the
    term is zero. It is not ordinary attention at initialisation, and nothing is learned.

    Args:
        num_heads: heads of the layer.
        alpha: 0.6 in vision and 0.4 in language modelling, as published.
        memory: holds the first layer's values; shared by the layers of one model.
        is_source: whether this is the model's first layer.
    """

    def __init__(
        self,
        num_heads: int,
        alpha: float = 0.6,
        memory: FirstValues | None = None,
        is_source: bool = False,
    ) -> None:
        super().__init__(num_heads)
        self.alpha = check_number("alpha", alpha, least=0.0)
        self.memory = memory
        self.is_source = is_source

    def forward(self, operator: Operator, v: Tensor) -> Tensor:
        """``v`` of shape ``(B, H, N, D)`` to ``A·v + α(v⁰ − v)``."""
        self.check_dropout_place()
        if self.memory is None:
            raise RuntimeError(
                "NeuTRENO needs the first layer's values: gfsa.baselines.apply(model, 'neutreno') "
                "gives the layers a common memory"
            )
        own, mixed = operator.powers(v, 1)
        own = repeat_heads(own, mixed)
        first = self.memory.first(own, self.is_source)
        if first is own:
            return mixed
        y = mixed + self.alpha * (first - own).to(at_least_float32(mixed.dtype))
        return y.to(mixed.dtype)

    def map(self, operator: DenseOperator) -> Tensor:
        # the added term contains another layer's values: it is no part of this layer's map
        return operator.dense()

    def config(self) -> dict[str, Any]:
        return {**super().config(), "alpha": self.alpha}
