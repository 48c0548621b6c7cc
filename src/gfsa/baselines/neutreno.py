"""NeuTRENO: every layer is held to the values of the first one."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gfsa.baselines.forward_state import FirstValues
from gfsa.baselines.map_methods import BaselineFilter
from gfsa.filters.checks import check_number
from gfsa.operators import DenseOperator, Operator
from gfsa.operators.base import at_least_float32
from gfsa.operators.dense import repeat_heads


class NeuTRENO(BaselineFilter):
    r"""NeuTRENO (Nguyen et al., 2023): attention, and back towards the first layer's values.

    .. math:: y = A v + α\,(v^0 - v)

    :math:`v^0` are the values of the model's first layer in the same forward; there the term is
    zero. Not ordinary attention at init, and nothing is learned.

    Args:
        num_heads: heads of the layer.
        alpha: 0.6 in vision and 0.4 in language modelling, as published.
        memory: shared by the layers of one model.
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
                "NeuTRENO needs to know the first layer's values: "
                "gfsa.baselines.apply(model, 'neutreno') tells the layers of each other"
            )
        own, mixed = operator.powers(v, 1)
        own = repeat_heads(own, mixed)
        first = self.memory.first(own, self.is_source)
        if first is own:
            return mixed
        y = mixed + self.alpha * (first - own).to(at_least_float32(mixed.dtype))
        return y.to(mixed.dtype)

    def map(self, operator: DenseOperator) -> Tensor:
        # the added term is not made of this layer's values
        return operator.dense()

    def config(self) -> dict[str, Any]:
        return {**super().config(), "alpha": self.alpha}
