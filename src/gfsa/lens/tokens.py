"""Find a layer's tokens in what its modules are called with: their axes, and which are padding."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gfsa.operators import Operator


def first_tensor(value: Any) -> Tensor | None:
    """The first floating-point tensor in a block's input or output: nested tuples, lists, dicts."""
    if isinstance(value, Tensor):
        # a nested tensor has no axis of tokens
        has_tokens = value.is_floating_point() and value.dim() >= 2 and not value.is_nested
        return value if has_tokens else None
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        for part in value:
            found = first_tensor(part)
            if found is not None:
                return found
    return None


AXES_IN_DOUBT = (
    "tokens were not measured, because their sizes do not show which axis is samples, tokens or "
    "features, or they are nested tensors or samples of several lengths in one list. If there are "
    "as many samples as tokens, take another batch size"
)


def axes_in_doubt(names: Collection[str]) -> str:
    """The warning about layers, or the input, whose tokens were not measured."""
    some = list(names)[:3]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(some)}{more}: {AXES_IN_DOUBT}"


# blocks with the layout that their attention's batch_first says; others may transpose around it
_LIE_AS_DECLARED = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


class AxesInDoubtError(Exception):
    """Features can be read in several ways; no number is better than one that may be wrong."""


class Attended(NamedTuple):
    """The tokens that an attention attends to: their sizes identify the axes around it."""

    batch: int
    """How many samples; each window of an image is one."""
    length: int
    """Tokens of a sample."""
    width: int
    """Features of a token."""
    attention: nn.Module
    """The attention module."""
    sequence_first: bool = False
    """Whether the attention has them as ``(N, B, D)``; blocks around it need not."""

    def order_of(self, x: Tensor) -> bool | None:
        """Whether ``x (·, ·, D)`` is sequence first, as its sizes show; None if they do not."""
        sizes, batch_first = tuple(x.shape[:2]), (self.batch, self.length)
        if self.batch == self.length or sizes not in (batch_first, batch_first[::-1]):
            return None
        if sizes != batch_first and not self.sequence_first and self.batch % self.length == 0:
            # M samples, of which each is several windows of M tokens, have these sizes as well
            raise AxesInDoubtError
        return sizes != batch_first

    def default_order(self, block: nn.Module) -> bool:
        """Whether what a block takes and returns is sequence first, where sizes do not show it."""
        if self.sequence_first and not isinstance(block, _LIE_AS_DECLARED):
            # SpeechBrain's blocks are batch first around such an attention, XLNet's are not
            raise AxesInDoubtError
        return self.sequence_first

    def features_first_in(self, x: Tensor) -> bool | None:
        """Whether a grid is ``(B, D, H, W)``, as its sizes show; None if they do not."""
        total = self.batch * self.length
        first, last = x[:, 0].numel() == total, x[..., 0].numel() == total
        return None if first == last else first


def attended_by_values(attention: nn.Module, v: Tensor) -> Attended:
    """What an attention attends to, by the values ``(..., H, N, d)`` that its filter gets."""
    lead = v.shape[:-3]
    width = v.shape[-3:-2].numel() * v.shape[-1]
    sequence_first = _declares_sequence_first(attention)
    if not hasattr(attention, "batch_first") and len(lead) == 1:
        # tokens further apart in memory than samples were projected from (N, B, D)
        sequence_first = v.stride(-2) > v.stride(0)
    return Attended(lead.numel(), v.shape[-2], width, attention, sequence_first)


def attended_by_input(
    attention: nn.Module, x: Tensor | None, around: Collection[tuple[int, ...]]
) -> Attended:
    """The same of an attention without a filter, by what it or a block around it was called with.

    Args:
        attention: the attention module.
        x: the first floating-point tensor of the call.
        around: shapes of matrices among the arguments of the modules around it. Those of ids and
            masks are ``(B, N)``.

    Raises:
        AxesInDoubtError: if it was not called with tokens, or may have been in several ways.
    """
    width = _width(attention)
    sequence_first = _declares_sequence_first(attention)
    if x is None or x.dim() > 4:
        raise AxesInDoubtError
    if x.dim() == 4:
        samples, tokens = _tokens_of_grid(x, _by_width(x, width)).shape[:2]
        return Attended(samples, tokens, width, attention)
    if x.dim() == 2:
        return Attended(1, len(x), width, attention, sequence_first)
    one, other = x.shape[:2]
    if not hasattr(attention, "batch_first"):
        sequence_first = (other, one) in around and (one, other) not in around
    batch, length = (other, one) if sequence_first else (one, other)
    return Attended(batch, length, width, attention, sequence_first)


def tokens_of(
    x: Tensor,
    attended: Attended,
    block: nn.Module,
    entered: Tensor | None = None,
    valid: Tensor | None = None,
) -> Tensor | None:
    """Features as ``(B, N, D)``, or None if they are not features of tokens.

    Args:
        x: the input or output of a block: batch first, sequence first, a grid ``(B, H, W, D)`` or
            ``(B, D, H, W)``, or the tokens of all samples one after another ``(ΣN, D)``, as in
            graph libraries.
        attended: what the attention in the block attends to.
        block: the block, or the attention itself.
        entered: the input of the block, whose sizes may show more than those of its output.
        valid: ``(B, N)``; separates concatenated samples of several lengths, which reads their
            lengths from the device.

    Raises:
        AxesInDoubtError: if ``x`` can be read in several ways.
    """
    shown = [like for like in (x, entered) if like is not None and like.dim() == x.dim()]
    if x.dim() == 4:
        found = [attended.features_first_in(like) for like in shown]
        # windows that reach beyond the grid have more tokens than it
        found.append(_by_width(x, attended.width))
        return _tokens_of_grid(x, next((first for first in found if first is not None), None))
    if x.dim() == 3:
        orders = [attended.order_of(like) for like in shown]
        order = next((order for order in orders if order is not None), None)
        is_sequence_first = attended.default_order(block) if order is None else order
        return x.transpose(0, 1) if is_sequence_first else x
    if x.dim() != 2 or len(x) == attended.batch:
        # one vector a sample is no token
        return None
    if len(x) == attended.batch * attended.length:
        return x.unflatten(0, (attended.batch, attended.length))
    if valid is None or int(valid.sum()) != len(x):
        raise AxesInDoubtError
    dense = x.new_zeros(*valid.shape, x.shape[-1])
    dense[valid] = x
    return dense


def _by_width(x: Tensor, width: int) -> bool | None:
    first, last = x.shape[1] == width, x.shape[3] == width
    return None if first == last else first


def _tokens_of_grid(x: Tensor, features_first: bool | None) -> Tensor:
    if features_first is None:
        raise AxesInDoubtError
    return x.flatten(2).mT if features_first else x.flatten(1, 2)


def _declares_sequence_first(attention: nn.Module) -> bool:
    return getattr(attention, "batch_first", True) is False


def _width(attention: nn.Module) -> int:
    """The features of a token that enters an attention module; 0 if no projection shows it."""
    for module in attention.modules():
        for name in ("embed_dim", "in_features", "in_channels"):
            found = getattr(module, name, None)
            if isinstance(found, int):
                return found
    return 0


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
        handed_down: the mask that the modules around the layer got (:mod:`gfsa.lens.watch`).
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
    if not operator.holds_matrix:
        return None
    matrix = operator.dense().detach()
    matrix = matrix[(None,) * (3 - matrix.dim())]
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
