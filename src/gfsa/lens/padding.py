"""Which tokens of a layer count, and which are padding."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from gfsa.operators import Operator


class Padding:
    """The masks of a layer's tokens, each for the tensors whose shape it has.

    Args:
        own: the mask of the user, which overrides all others.
        stated: what the model was called with, and what the attention was told to hide. A token
            counts if all of them say so.
        shown: what an attention map shows, where nothing is stated.
    """

    def __init__(
        self,
        own: Tensor | None = None,
        stated: Iterable[Tensor | None] = (),
        shown: Tensor | None = None,
    ) -> None:
        self._ranks = ([own], list(stated), [shown])

    def of(self, shape: Iterable[int], device: torch.device) -> Tensor | None:
        """The mask of tokens of this shape, True where one counts; None if no mask is known."""
        wanted = tuple(shape)
        for masks in self._ranks:
            fitting = [m.to(device) for m in masks if m is not None and tuple(m.shape) == wanted]
            if fitting:
                return torch.stack(fitting).all(0) if len(fitting) > 1 else fitting[0]
        return None


def padding_of(
    handed_down: Tensor | None, operator: Operator, v: Tensor, own: Tensor | None = None
) -> Padding:
    """The padding of a layer whose filter was called with an operator and values.

    Args:
        handed_down: the mask that the modules around the layer got (:mod:`gfsa.lens.calls`).
        operator: the attention map.
        v: ``(..., H, N, d)``.
        own: the mask of the user.
    """
    stated = (handed_down, masked_out(operator, v))
    shape = (*v.shape[:-3], v.shape[-2])
    is_known = any(mask is not None and mask.shape == shape for mask in (own, *stated))
    # reads all entries of a map
    return Padding(own, stated, None if is_known else shown_by_map(operator, v))


def masked_out(operator: Operator, v: Tensor) -> Tensor | None:
    """``(..., N)``, False where the operator's masks hide a token from every query; or None."""
    visible = operator.visibility()
    return None if visible is None else _of_keys(visible.visible_keys(), v)


def shown_by_map(operator: Operator, v: Tensor) -> Tensor | None:
    """The same of a map that is written out: False where all weights of a token are 0; or None."""
    matrix = getattr(operator, "matrix", getattr(operator, "weights", None))
    if not isinstance(matrix, Tensor):
        return None
    matrix = matrix.detach()[(None,) * (3 - matrix.dim())]
    seen = (matrix > 0) & ~_sees_nothing(matrix)[..., None]
    return _of_keys(seen.any(-2).any(-2), v)


def _sees_nothing(matrix: Tensor) -> Tensor:
    """Rows ``(..., H, N)`` of queries that may see no key: softmax spreads them over all keys.

    Libraries hide keys by adding a number so large that scores are lost in it.
    """
    spread = matrix.amax(-1) == matrix.amin(-1)
    if matrix.shape[-1] > 1:
        # the last row of a causal map is that of a query that sees all keys
        is_causal = matrix[..., -2, -1] == 0
        spread[..., -1] &= ~is_causal
    # where all rows are alike, the model has learned nothing so far
    return spread & ~spread.flatten(-2).all(-1)[..., None, None]


def _of_keys(keys: Tensor | None, v: Tensor) -> Tensor | None:
    if keys is None or keys.shape[-1] != v.shape[-2]:
        return None
    return keys.expand(*v.shape[:-3], v.shape[-2])


def checked_mask(valid: Any) -> Tensor | None:
    """The argument ``valid`` of the lens as a bool tensor; a mask of 0 and 1 may have any dtype."""
    if valid is None:
        return None
    if not isinstance(valid, Tensor):
        raise TypeError(
            f"valid must be a tensor (B, N), or a function of the batch that returns one, "
            f"got {type(valid).__name__}"
        )
    if valid.dtype == torch.bool:
        return valid
    others = valid[(valid != 0) & (valid != 1)]
    if others.numel():
        raise ValueError(
            f"valid must be True or 1 where a token counts, and False or 0 elsewhere, got "
            f"{others[0].item()}; of a mask that is added to scores: valid=mask == 0"
        )
    return valid.bool()
