"""Hooks that find the tokens which leave each layer of a model: their axes, and their padding."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gfsa.filters import GraphFilter
from gfsa.operators import Operator
from gfsa.plugs.sites import filters_of


@dataclass
class Layer:
    """One run of an attention module: models such as ALBERT run one module at every depth."""

    name: str
    block: nn.Module | None = None
    """The outermost block around it; None if it runs outside of all blocks."""
    entered: Tensor | None = None
    """The tensor that this block was called with."""
    attended: Attended | None = None
    """None until the filter runs."""
    masks: Sequence[list[Tensor | None]] = ()
    """Masks in three groups: the user's own, those of the model's call and of the attention, and
    what an attention map shows. The first group that has masks of the tokens' shape decides; a
    token counts if all of these say so."""
    tokens: Tensor | None = None
    """What leaves this block, ``(B, N, D)``; None if its axes are in doubt."""

    def mask(self, shape: tuple[int, ...], device: torch.device) -> Tensor | None:
        """The mask of tokens of this shape, True where one counts; None if all do, as known."""
        for masks in self.masks:
            fitting = [m.to(device) for m in masks if m is not None and m.shape == shape]
            if fitting:
                found = torch.stack(fitting).all(0)
                # without a mask less is computed
                return None if bool(found.all()) else found
        return None


class Watch:
    """Hooks that follow the layers of a model, in which every attention module has a filter.

    The hooks stay on the model, for the caller to remove.

    Args:
        model: the model.
        attention: its attention modules, by name.
        on_layer: called with a layer when it is over.
        on_filter: called after a layer's filter with the layer, the filter, its operator and
            values (with the depth term), and its output.
    """

    def __init__(
        self,
        model: nn.Module,
        attention: Mapping[str, nn.Module],
        on_layer: Callable[[Layer], None],
        on_filter: Callable[[Layer, GraphFilter, Operator, Tensor, Tensor], None],
    ) -> None:
        self.attention = attention
        self.on_layer = on_layer
        self.on_filter = on_filter
        # what the modules that run now were called with
        self._calls: dict[str, _Call] = {}
        # the layer whose blocks run now
        self._layer: Layer | None = None
        # what runs for a measurement, or between two forwards, is not followed
        self.is_idle = True
        blocks = _blocks_around(model, attention)
        self._layer_of = {block: name for name, around in blocks.items() for block in around}
        # the model, "", and all modules in it that contain blocks
        containers = {""} | {
            part
            for name, own in blocks.items()
            for part in _parts_around(name)
            if len(part) < len(own[-1])
        }
        # encoders, decoders and towers: the model has attention outside of them, on other tokens
        self._parts = {part for part in containers if not all(_is_in(part, n) for n in blocks)}
        modules = dict(model.named_modules())
        for name in dict.fromkeys((*containers, *self._layer_of)):
            enter, leave = partial(self._enter, name), partial(self._leave, name)
            modules[name].register_forward_pre_hook(enter, with_kwargs=True)
            modules[name].register_forward_hook(leave, with_kwargs=True)
        for name, filter in filters_of(model).items():
            filter.register_forward_pre_hook(_mix_first)
            filter.register_forward_hook(partial(self._filtered, name))

    def start(self, valid: Tensor | None, batch: Any) -> None:
        """Call before a forward of the model.

        The mask ``valid (B, N)`` overrides all others. A padding mask in ``batch`` counts as one
        that the model was given.
        """
        self._valid = valid
        self._batch = _Call(_with_batches({"batch": batch}))
        self._calls.clear()
        self._layer, self.is_idle = None, False

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if not name and not self.is_idle:
            # an earlier call of the model may have ended in a layer
            self._layer = None
        self._calls[name] = _Call.of(module, args, kwargs)
        # the first block to begin is the outermost one around its attention
        if self._layer is None and name in self._layer_of and not self.is_idle:
            self._layer = Layer(self._layer_of[name], module, first_tensor((args, kwargs)))

    @torch.no_grad()
    def _leave(
        self, name: str, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any
    ) -> None:
        self._calls.pop(name, None)
        layer, x = self._layer, first_tensor(output)
        if layer is None or name not in self._layer_of or self.is_idle:
            return
        # blocks end from the inside out, so what leaves the outermost one is kept
        if layer.attended is not None and x is not None:
            try:
                tokens = tokens_of(x, layer, module, first_tensor((args, kwargs)))
                layer.tokens = layer.tokens if tokens is None else tokens
            except AxesInDoubtError:
                layer.tokens = None
        if module is layer.block:
            self._layer = None
            self.on_layer(layer)

    @torch.no_grad()
    def _filtered(self, name: str, filter: GraphFilter, args: Any, output: Any) -> None:
        """The hook on a filter, whose arguments show the tokens and the masks of the layer."""
        # what is checkpointed runs again in a backward
        is_forward = torch._C._current_graph_task_id() == -1
        if self.is_idle or args[1].is_nested or not is_forward:
            return
        layer = self._layer
        if layer is None or layer.name != name:
            # an attention whose forward is called by itself has no hooks, and may be in no block
            layer = Layer(name)
        operator, v = args[0].whole(), args[1].detach()
        samples, length = v.shape[:-3], v.shape[-2]
        # tokens further apart in memory than samples were projected from (N, B, D)
        is_turned = len(samples) == 1 and v.stride(-2) > v.stride(0)
        sequence_first = getattr(self.attention[name], "batch_first", not is_turned) is False
        width = v.shape[-3:-2].numel() * v.shape[-1]
        layer.attended = Attended(samples.numel(), length, width, sequence_first)
        visible = operator.visibility()
        # False where the operator's masks hide a token from every query
        hidden = None if visible is None else _of_keys(visible.visible_keys(), v)
        layer.masks = [[self._valid], [self._mask_of(name), hidden]]
        if layer.mask((*samples, length), v.device) is None:
            # this one reads all entries of a map
            layer.masks.append([shown_by_map(operator, v)])
        self.is_idle = True
        self.on_filter(layer, filter, operator, v, output)
        self.is_idle = False
        if layer is not self._layer:
            self.on_layer(layer)

    def _mask_of(self, layer: str) -> Tensor | None:
        """The padding mask that was handed down to a layer that runs now, True where one counts.

        A padding mask that a model is called with need not be about the tokens of every layer:
        there are decoders, and towers for images and text. It is not about those of a decoder or
        tower that was called without it.
        """
        around = sorted((n for n in self._calls if _is_in(n, layer)), key=len, reverse=True)
        calls = [(layer[len(n) :], self._calls[n], n in self._parts) for n in around]
        square = None
        for path, call, is_part in [*calls, (layer, self._batch, False)]:
            names = [name for name in _MASKS if name in call.given]
            # of a module that takes masks of one kind alone, they are about all of its layers
            names = [n for n in names if (n in _OF_TARGET) == ("decoder" in path)] or names
            given = {name: call.given[name] for name in names}
            masks = (_counted(mask, _MASKS[name]) for name, mask in given.items())
            mask = next((mask for mask in masks if mask is not None), None)
            if mask is not None:
                if mask.shape[0] != mask.shape[1]:
                    return mask
                # (B, N) of as many samples as tokens, or pairs (N, N) that an inner module made:
                # the outermost is the padding mask
                square = mask
            elif is_part and not call.passes_on:
                # a mask may have come in another form, made further out: pairs, a description
                given = given or {n: value for n, value in call.given.items() if "mask" in n}
                if all(value is None for value in given.values()):
                    break
        return square


def _mix_first(filter: GraphFilter, args: tuple[Operator, Tensor]) -> tuple[Operator, Tensor]:
    """A hook that adds the depth term to the values, which the filter then takes as they are."""
    return args[0], filter.mixed(*args)


# names of masks in the arguments of models, and whether True means that a token counts
_MASKS = {
    "attention_mask": True,
    "src_key_padding_mask": False,
    "key_padding_mask": False,
    "decoder_attention_mask": True,
    "tgt_key_padding_mask": False,
}
_OF_TARGET = {"decoder_attention_mask", "tgt_key_padding_mask"}


def _counted(mask: Any, true_counts: bool) -> Tensor | None:
    """A mask ``(B, N)`` as True where a token counts."""
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    if not true_counts:
        # of torch: True or -inf hides
        return ~mask.bool()
    # zeros and ones, or zeros and large negative numbers to add to scores
    return mask == 0 if bool((mask < 0).any()) else mask != 0


class _Call(NamedTuple):
    """What a module was called with."""

    given: dict[str, Any]
    """By name, in the order of the parameters, and what is in those that are a whole batch."""
    passes_on: bool = True
    """Whether its forward has ``*args``: a wrapper, whose arguments have names further inside."""

    @classmethod
    def of(cls, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> _Call:
        """A call, with the names of the forward's parameters."""
        try:
            bound = inspect.signature(module.forward).bind(*args, **kwargs)
        except (TypeError, ValueError):
            # compiled code, whose parameters have no names
            return cls(_with_batches(kwargs))
        bound.apply_defaults()
        kinds = [parameter.kind for parameter in bound.signature.parameters.values()]
        # a Sequential takes no masks, whatever its modules do with them
        passes_on = inspect.Parameter.VAR_POSITIONAL in kinds or isinstance(module, nn.Sequential)
        return cls(_with_batches(bound.arguments), passes_on)


def _with_batches(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name, and what is in those that are mappings, as ``**kwargs`` are."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        found |= {name: value} | (dict(value) if isinstance(value, Mapping) else {})
    return found


def _blocks_around(model: nn.Module, attention: Iterable[str]) -> dict[str, list[str]]:
    """For each attention module, the names of the blocks that contain no other attention.

    Innermost first, beginning with the attention module itself. A block is an element of a
    ``ModuleList``, ``Sequential`` or ``ModuleDict``: what a model repeats with depth.
    """
    modules = dict(model.named_modules())
    lists = (nn.ModuleList, nn.ModuleDict)
    names, found = list(attention), {}
    for name in names:
        found[name] = [name]
        for part in _parts_around(name):
            if any(other != name and _is_in(part, other) for other in names):
                break
            parent = modules[part.rpartition(".")[0]]
            if isinstance(parent, (*lists, nn.Sequential)) and not isinstance(modules[part], lists):
                found[name].append(part)
    return found


def _parts_around(name: str) -> list[str]:
    """The names of the modules that a module is in, the innermost first, without the model."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]


def _is_in(container: str, name: str) -> bool:
    """Whether the module ``name`` is ``container`` or a module inside of it."""
    return not container or f"{name}.".startswith(f"{container}.")


def first_tensor(value: Any) -> Tensor | None:
    """The first floating-point tensor in a block's input or output: nested tuples, lists, dicts."""
    if isinstance(value, Tensor):
        # a nested tensor has no axis of tokens
        has_tokens = value.is_floating_point() and value.dim() >= 2 and not value.is_nested
        return value if has_tokens else None
    if isinstance(value, Mapping):
        value = list(value.values())
    parts = value if isinstance(value, (tuple, list)) else ()
    return next((x for x in map(first_tensor, parts) if x is not None), None)


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
    sequence_first: bool
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


def tokens_of(
    x: Tensor, layer: Layer, block: nn.Module | None, entered: Tensor | None = None
) -> Tensor | None:
    """What enters or leaves a block, as ``(B, N, D)``, or None if it is not features of tokens.

    ``x`` is batch first, sequence first, a grid ``(B, H, W, D)`` or ``(B, D, H, W)``, or all
    samples one after another ``(ΣN, D)``, as in graph libraries: then the layer's mask separates
    samples of several lengths. The sizes of what entered the block may show more than those of its
    output.
    """
    attended = layer.attended
    assert attended is not None
    shown = [like for like in (x, entered) if like is not None and like.dim() == x.dim()]
    if x.dim() == 4:
        total, width = attended.batch * attended.length, attended.width
        # whether the features can be the second axis, and whether the last
        can_be = [(like[:, 0].numel() == total, like[..., 0].numel() == total) for like in shown]
        # windows that reach beyond the grid have more tokens than it
        can_be.append((x.shape[1] == width, x.shape[3] == width))
        features_first = [second for second, last in can_be if second != last]
        if not features_first:
            raise AxesInDoubtError
        return x.flatten(2).mT if features_first[0] else x.flatten(1, 2)
    if x.dim() == 3:
        orders = (attended.order_of(like) for like in shown)
        is_sequence_first = next((order for order in orders if order is not None), None)
        if is_sequence_first is None:
            is_sequence_first = attended.sequence_first
            if is_sequence_first and not isinstance(block, _LIE_AS_DECLARED):
                # SpeechBrain's blocks are batch first around such an attention, XLNet's are not
                raise AxesInDoubtError
        return x.transpose(0, 1) if is_sequence_first else x
    if x.dim() != 2 or len(x) == attended.batch:
        # one vector a sample is no token
        return None
    sizes = (attended.batch, attended.length)
    if len(x) == attended.batch * attended.length:
        return x.unflatten(0, sizes)
    valid = layer.mask(sizes, x.device)
    if valid is None or int(valid.sum()) != len(x):
        raise AxesInDoubtError
    dense = x.new_zeros(*sizes, x.shape[-1])
    dense[valid] = x
    return dense


def shown_by_map(operator: Operator, v: Tensor) -> Tensor | None:
    """``(..., N)``, False where all weights of a token are 0; None of a map not written out.

    Queries that may see no key do not count. Softmax spreads them over all keys, because libraries
    hide keys by adding a number so large that scores are lost in it.
    """
    if not operator.holds_matrix:
        return None
    matrix = operator.dense().detach()
    matrix = matrix[(None,) * (3 - matrix.dim())]
    spread = matrix.amax(-1) == matrix.amin(-1)
    if matrix.shape[-1] > 1:
        # the last row of a causal map is that of a query that sees all keys
        is_causal = matrix[..., -2, -1] == 0
        spread[..., -1] &= ~is_causal
    # where all rows are alike, the model has learned nothing so far
    spread &= ~spread.flatten(-2).all(-1)[..., None, None]
    seen = (matrix > 0) & ~spread[..., None]
    return _of_keys(seen.any(-2).any(-2), v)


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
    others = valid[(valid != 0) & (valid != 1)]
    if others.numel():
        raise ValueError(
            f"valid must be True or 1 where a token counts, and False or 0 elsewhere, got "
            f"{others[0].item()}; of a mask that is added to scores: valid=mask == 0"
        )
    return valid.bool()
