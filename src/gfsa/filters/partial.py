"""A polynomial whose high powers are there for some heads only."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from gfsa.filters.base import Polynomial
from gfsa.filters.spec import check_size
from gfsa.operators import Operator
from gfsa.operators.base import columns_of, own_share, runs_of, take_heads


class PartialPolynomial(Polynomial):
    r"""A polynomial of full degree on some heads, of degree 1 on the others.

    .. math:: H_h = c_{h,0} I + c_{h,1} A_h + [h \in high] \sum_{k \ge 2} c_{h,k} A_h^k

    All heads do the first pass, only the heads in ``high`` do the others. Under attention dropout,
    and with operators that cannot be split by head, every head does every pass.

    Args:
        num_heads: heads of the layer.
        degree: of the heads in ``high``, at least 2.
        high: heads counted from 0, in order.
        lr_multiplier: see :class:`gfsa.GraphFilter`.
    """

    def __init__(
        self, num_heads: int, degree: int, high: Sequence[int], lr_multiplier: float = 1.0
    ) -> None:
        super().__init__(num_heads, degree, lr_multiplier)
        # the basis of a pruned filter differs from head to head
        check_size(num_heads, degree + 1, degree + 1)
        self.high = list(high)
        if not all(type(head) is int for head in self.high):
            raise TypeError(f"high must be a list of heads, numbers from 0, got {high!r:.80}")
        in_order = all(low < up for low, up in pairwise([-1, *self.high, num_heads]))
        if degree < 2 or not self.high or not in_order:
            raise ValueError(
                f"expected a degree of at least 2 and heads among 0 … {num_heads - 1} in order, "
                f"got degree={degree} and high={self.high!r:.80}"
            )
        # the learned numbers that low heads do not use multiply zeros, so they are not trained
        with torch.inference_mode(False):
            kept = torch.zeros(num_heads, 1, degree + 1, dtype=torch.float64, device="cpu")
            kept[:, :, :2] = kept[self.high] = 1.0
            self._exact_basis = self._exact_basis * kept
        self._place_constants(self.basis.device, self.basis.dtype)

    def forward(self, operator: Operator, v: Tensor) -> Tensor:
        some = operator.second_pass(self.high)
        if some is None:
            return super().forward(operator, v)
        if not operator.values_are_mixed:
            v = self.mix_values(v)
        identity, first, *columns = columns_of(self.coefficients())
        tokens, mixed = operator.powers(v, 1)
        _, *higher = some.further(take_heads(mixed, self.high), self.degree - 1)
        # summed in the coefficients' precision and rounded once, as in operators.base.combine
        share = self.share()
        if share is not None:
            identity = identity - own_share(share, mixed, tokens)
        y = identity * tokens + first * mixed
        terms = (take_heads(c, self.high) * u for c, u in zip(columns, higher, strict=True))
        extra: Any = sum(terms)
        done = 0
        for start, length in runs_of(self.high):
            y.narrow(-3, start, length).add_(extra.narrow(-3, done, length))
            done += length
        return y.to(mixed.dtype)

    def config(self) -> dict[str, Any]:
        return {**super().config(), "high": self.high}
