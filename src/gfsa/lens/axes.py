"""Which axes of a layer's features are samples, tokens and features."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from torch import Tensor, nn

from gfsa.lens.tokens import arguments, first_tensor

AXES_IN_DOUBT = (
    "tokens were not measured, because their sizes do not show which axis is samples, tokens or "
    "features, or they are nested tensors or samples of several lengths in one list. If there are "
    "as many samples as tokens, take another batch size"
)

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
        return sizes != batch_first

    @property
    def may_be_windows(self) -> bool:
        """Whether a block's ``(N, B, D)`` may also be M samples of several windows of M tokens."""
        return not self.sequence_first and self.batch % self.length == 0

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
    attention: nn.Module,
    called: nn.Module,
    args: tuple[Any, ...],
    kwargs: Any,
    around: Collection[tuple[int, int]],
) -> Attended:
    """The same of an attention without a filter, by what it or a block around it was called with.

    Args:
        attention: the attention module.
        called: the attention, or the innermost block around it whose call is seen (a compiled block
            calls no hooks inside of it).
        args: its arguments.
        kwargs: those by name.
        around: shapes of matrices among the arguments of the modules around it. Those of ids and
            masks are ``(B, N)``.

    Raises:
        AxesInDoubtError: if it was not called with tokens, or may have been in several ways.
    """
    x = first_tensor(arguments(called, args, kwargs).given)
    if x is None:
        # a wrapper, whose arguments have no names
        x = first_tensor((args, kwargs))
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


class TokenReader:
    """Reads tokens from the inputs and outputs of blocks.

    It remembers the order of axes that sizes have shown, for batches in which they do not.
    """

    def __init__(self) -> None:
        self._sequence_first: dict[nn.Module, bool] = {}
        self._features_first: dict[type[nn.Module], bool] = {}

    def note(self, attended: Attended, entered: Tensor | None) -> None:
        """Remember what the input of an attention module shows."""
        order = None if entered is None or entered.dim() != 3 else attended.order_of(entered)
        if order is not None:
            self._sequence_first[attended.attention] = order

    def tokens(
        self,
        x: Tensor,
        attended: Attended,
        block: nn.Module,
        entered: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> Tensor | None:
        """Features as ``(B, N, D)``, or None if they are not features of tokens.

        Args:
            x: the input or output of a block: batch first, sequence first, a grid ``(B, H, W, D)``
                or ``(B, D, H, W)``, or the tokens of all samples one after another ``(ΣN, D)``,
                as in graph libraries.
            attended: what the attention in the block attends to.
            block: the block, or the attention itself.
            entered: the input of the block, whose sizes may show more than those of its output.
            valid: ``(B, N)``; separates concatenated samples of several lengths, which reads a
                number from the device.

        Raises:
            AxesInDoubtError: if ``x`` can be read in several ways.
        """
        if x.dim() == 4:
            return _tokens_of_grid(x, self._has_features_first(x, attended, block, entered))
        if x.dim() == 3:
            order = self._order(x, attended, block, entered)
            return x.transpose(0, 1) if order else x
        if x.dim() != 2:
            return None
        if len(x) == attended.batch * attended.length:
            return x.unflatten(0, (attended.batch, attended.length))
        if valid is not None and int(valid.sum()) == len(x):
            dense = x.new_zeros(*valid.shape, x.shape[-1])
            dense[valid] = x
            return dense
        return None

    def _order(
        self, x: Tensor, attended: Attended, block: nn.Module, entered: Tensor | None
    ) -> bool:
        """Whether ``x`` is sequence first."""
        is_attention = block is attended.attention
        for shown in (x, entered):
            order = None if shown is None or shown.dim() != 3 else attended.order_of(shown)
            if order and attended.may_be_windows and not is_attention:
                # the attention's own input decides: (N, B, D) like its block's, or windows
                if attended.attention not in self._sequence_first:
                    raise AxesInDoubtError
                return self._sequence_first[attended.attention]
            if order is not None:
                self._sequence_first[block] = order
                return order
        if block in self._sequence_first:
            return self._sequence_first[block]
        if isinstance(block, _LIE_AS_DECLARED) or x.shape[:2].numel() == 1:
            return attended.sequence_first
        if attended.sequence_first:
            # SpeechBrain's blocks are batch first around such an attention, XLNet's are not
            raise AxesInDoubtError
        return False

    def _has_features_first(
        self, x: Tensor, attended: Attended, block: nn.Module, entered: Tensor | None
    ) -> bool | None:
        """Whether a grid is ``(B, D, H, W)``; None if it is in doubt."""
        for shown in (x, entered):
            first = None
            if shown is not None and shown.dim() == 4:
                first = attended.features_first_in(shown)
            if first is not None:
                self._features_first[type(block)] = first
                return first
        # windows that reach beyond the grid have more tokens than it
        first = _by_width(x, attended.width)
        # blocks of a class differ in their sizes from stage to stage
        return self._features_first.get(type(block)) if first is None else first


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
