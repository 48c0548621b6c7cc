"""What the methods that act on the attention map share."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from gfsa.filters import GraphFilter, Polynomial


class BaselineFilter(GraphFilter):
    """Takes the place of a filter in a plugged layer, without being a polynomial of A."""

    is_polynomial = False

    def __init__(
        self, num_heads: int, basis: Tensor | None = None, lr_multiplier: float = 1.0
    ) -> None:
        attention = torch.tensor([0.0, 1.0], dtype=torch.float64, device="cpu")
        super().__init__(num_heads, attention, basis, lr_multiplier=lr_multiplier)

    def coefficients(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} is no polynomial of the attention map: it has no coefficients"
        )

    def fold(self) -> Polynomial:
        return self.coefficients()

    def check_dropout_place(self) -> None:
        """The map is known by what it does, so only entries of A can be dropped."""
        if self.dropout_after != "attention":
            raise ValueError(
                f"{type(self).__name__} drops entries of A; plug(..., dropout_after='attention')"
            )
