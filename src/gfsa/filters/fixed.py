"""Fixed filters: polynomials of the attention map without learned numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gfsa.filters.base import GraphFilter, polynomial
from gfsa.filters.spec import check_order


class Twicing(GraphFilter):
    r"""Twicing attention, :math:`H = 2A - A^2 = A + A (I - A)`, without learned numbers.

    It adds to :math:`A v` the attention of the residual, :math:`A (v - A v)`.
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__(num_heads, polynomial(0.0, 2.0, -1.0))


class Laplacian(GraphFilter):
    r"""The graph Laplacian, :math:`H = I - A`, without learned numbers.

    It gives what attention removes from v, :math:`v - A v`.
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__(num_heads, polynomial(1.0, -1.0))


class PageRank(GraphFilter):
    r"""Personalised PageRank: L steps of A, each of which returns to v with probability α.

    .. math:: z_0 = v, \quad z_{t+1} = (1-α) A z_t + α v, \qquad
              H = (1-α)^{L} A^{L} + α \sum_{k<L} (1-α)^k A^k

    It has no learned numbers; :meth:`fold` gives a :class:`Polynomial` that starts from it.

    Args:
        num_heads: heads of the layer.
        alpha: the probability α, 0 to 1.
        hops: the number of steps L, at least 1, which is the degree.
    """

    def __init__(self, num_heads: int, alpha: float = 0.15, hops: int = 4) -> None:
        check_order("hops", hops, least=1)
        if not 0.0 <= alpha <= 1.0:
            raise ValueError(f"alpha is a probability, expected 0 ≤ alpha ≤ 1, got {alpha!r:.80}")
        self_returns = [alpha * (1 - alpha) ** k for k in range(hops)]
        super().__init__(num_heads, polynomial(*self_returns, (1 - alpha) ** hops))
        self.alpha = float(alpha)
        self.hops = hops

    def config(self) -> dict[str, Any]:
        return {**super().config(), "alpha": self.alpha, "hops": self.hops}


class Exclusive(GraphFilter):
    r"""Attention without the part along the token's own value, :math:`H = A - a\,diag(p)`.

    .. math:: y = A v - a\,p\,v, \qquad
              p_i = \langle (A v)_i, v_i \rangle / \langle v_i, v_i \rangle

    With a = 1 every output is orthogonal to the token's own v (exclusive self-attention, arXiv
    2603.09078). It is an identity coefficient that each token computes for itself: no parameter, no
    second pass, no cache. :meth:`GraphFilter.exclude` gives any other filter the same term.

    A fixed share changes the model from the first step on, so it is for training from scratch. For
    a trained model, ``Exclusive(heads, share=0.0, learn=True)`` starts as the model is.

    Args:
        num_heads: heads of the layer.
        share: a, one number or one for each head.
        learn: whether each head learns its share.
        lr_multiplier: see :class:`GraphFilter`.

    Examples:
        >>> report = gfsa.plug(model, filter=gfsa.Exclusive)
    """

    def __init__(
        self,
        num_heads: int,
        share: float | Sequence[float] = 1.0,
        learn: bool = False,
        lr_multiplier: float = 1.0,
    ) -> None:
        super().__init__(num_heads, polynomial(0.0, 1.0), lr_multiplier=lr_multiplier)
        self.exclude(share, learn)

    def config(self) -> dict[str, Any]:
        return {**super().config(), **self._describe_share(), "lr_multiplier": self.lr_multiplier}
