"""The exclusive filter: attention without what a token finds of itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gfsa.filters.base import GraphFilter, polynomial


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

    Raises:
        ValueError: if an argument is out of its range.

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
        return {
            **super().config(),
            **self.describe_share(),
            "lr_multiplier": self.lr_multiplier,
        }
