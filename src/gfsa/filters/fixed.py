"""Fixed filters: polynomials of the attention map without learned numbers."""

from __future__ import annotations

from typing import Any

from gfsa.filters.base import GraphFilter, polynomial
from gfsa.filters.checks import check_order, check_positive_int


class Twicing(GraphFilter):
    r"""Twicing attention, :math:`H = 2A - A^2 = A + A (I - A)`: adds the residual, smoothed."""

    def __init__(self, num_heads: int) -> None:
        super().__init__(num_heads, polynomial(0.0, 2.0, -1.0))


class Laplacian(GraphFilter):
    r"""The graph Laplacian, :math:`H = I - A`: what attention would remove; learns nothing."""

    def __init__(self, num_heads: int) -> None:
        super().__init__(num_heads, polynomial(1.0, -1.0))


class PageRank(GraphFilter):
    r"""Personalised PageRank: diffuse ``hops`` times and return to v with probability ``alpha``.

    .. math:: z_0 = v, \quad z_{t+1} = (1-α) A z_t + α v, \qquad
              H = (1-α)^{L} A^{L} + α \sum_{k<L} (1-α)^k A^k

    Learns nothing; fold it to learn from there.
    """

    def __init__(self, num_heads: int, alpha: float = 0.15, hops: int = 4) -> None:
        check_positive_int("num_heads", num_heads)
        check_order("hops", hops, least=1)
        if not 0.0 <= alpha <= 1.0:
            raise ValueError(f"alpha is a probability, expected 0 ≤ alpha ≤ 1, got {alpha!r:.80}")
        self_returns = [alpha * (1 - alpha) ** k for k in range(hops)]
        super().__init__(num_heads, polynomial(*self_returns, (1 - alpha) ** hops))
        self.alpha = float(alpha)
        self.hops = hops

    def config(self) -> dict[str, Any]:
        return {**super().config(), "alpha": self.alpha, "hops": self.hops}
