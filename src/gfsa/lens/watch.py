"""Hooks that find the tokens which leave each layer of a model: their axes, and their padding."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gfsa.filters import GraphFilter
from gfsa.operators import Operator
from gfsa.plugs.sites import accepting_sites, filters_of, grouped_reasons, sites


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every self-attention module of the model that has a filter or can have one, by name."""
    return {name: site.module for name, site in accepting_sites(model, sites(model)).items()}


@dataclass
class Layer:
    """One run of an attention module: models such as ALBERT run one module at every depth."""

    name: str
    depth: int
    """Its number among the layers of the model, from 1."""
    outermost: str
    """The name of the outermost block around it that runs."""
    entered: Tensor | None
    """What this block was called with."""
    attended: Attended | None = None
    """None if it cannot be told what the attention attends to."""
    masks: list[list[Tensor | None]] | None = None
    """Masks in three groups: the user's own, those of the model's call and of the attention, and
    what an attention map shows. The first group that has masks of the tokens' shape decides; a
    token counts if all of these say so. None until the filter runs, or the attention ends."""
    tokens: Tensor | None = None
    """What leaves this block, ``(B, N, D)``; None if its axes are in doubt."""

    def mask(self, shape: tuple[int, ...], device: torch.device) -> Tensor | None:
        """The mask of tokens of this shape, True where one counts; None if no mask is known."""
        for masks in self.masks or ():
            fitting = [m.to(device) for m in masks if m is not None and m.shape == shape]
            if fitting:
                return torch.stack(fitting).all(0)
        return None


class Watch:
    """Hooks on a model that follow its layers, between :meth:`start` and :meth:`stop`.

    The outermost part of the model that runs counts as the model: a ``LightningModule`` is not
    called itself where its ``training_step`` calls ``self.net(x)``.

    Args:
        model: the model.
        attention: its attention modules, by name.
        on_layer: called with a layer when it is over.
        on_filter: called after a layer's filter with the layer, the filter, its operator and
            values (with the depth term), and its output. Without it no number is read from the
            device, which would wait for it.
    """

    def __init__(
        self,
        model: nn.Module,
        attention: Mapping[str, nn.Module],
        on_layer: Callable[[Layer], None],
        on_filter: Callable[[Layer, GraphFilter, Operator, Tensor, Tensor], None] | None = None,
    ) -> None:
        self.model = model
        self.attention = attention
        self.on_layer = on_layer
        self.on_filter = on_filter
        blocks = _blocks_around(model, attention)
        self._layer_of = {block: name for name, around in blocks.items() for block in around}
        # the model, "", and all modules in it that contain blocks
        self._containers = {""} | {
            part
            for name, own in blocks.items()
            for part in _parts_around(name)
            if len(part) < len(own[-1])
        }
        # encoders, decoders and towers: the model has attention outside of them, on other tokens
        self._parts = {
            part for part in self._containers if not all(_is_in(part, name) for name in blocks)
        }
        self._handles: list[RemovableHandle] = []

    def start(self, valid: Tensor | None = None, batch: Any = None) -> None:
        """Add the hooks.

        The mask ``valid (B, N)`` overrides all others. A padding mask in ``batch`` counts as one
        that the model was given.
        """
        self.stop()
        self._valid = valid
        self._batch = _Call(_with_batches({"batch": batch}))
        # what the modules that run now were called with
        self._calls: dict[str, _Call] = {}
        # the outermost container that runs now, and the layer whose blocks do
        self._outer: str | None = None
        self._layer: Layer | None = None
        self._depth = 0
        modules = dict(self.model.named_modules())
        for name in dict.fromkeys((*self._containers, *self._layer_of)):
            enter, leave = partial(self._enter, name), partial(self._leave, name)
            self._handles += [
                modules[name].register_forward_pre_hook(enter, with_kwargs=True),
                modules[name].register_forward_hook(leave, with_kwargs=True),
            ]
        for name, filter in filters_of(self.model).items():
            if self.on_filter is not None:
                self._handles.append(filter.register_forward_pre_hook(_mix_first))
            self._handles.append(filter.register_forward_hook(partial(self._filtered, name)))

    def stop(self) -> bool:
        """Remove the hooks; says whether there were any."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        return bool(handles)

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        # the compiler traces hooks inside a compiled block, whose own call has the masks
        if not torch.compiler.is_compiling():
            # what is checkpointed runs again in the backward
            is_forward = torch._C._current_graph_task_id() == -1
            if name in self._containers and self._outer in (None, name) and is_forward:
                self._outer, self._layer = name, None
                # the layers of the model before the first one inside of this part
                inside = [_is_in(name, layer) for layer in self.attention]
                self._depth = inside.index(True) if True in inside else 0
            self._calls[name] = _Call.of(module, args, kwargs)
        # the first block to begin is the outermost one around its attention
        if self._outer is not None and self._layer is None and name in self._layer_of:
            self._depth += 1
            entered = first_tensor((args, kwargs))
            self._layer = Layer(self._layer_of[name], self._depth, name, entered)

    @torch.no_grad()
    def _leave(
        self, name: str, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any
    ) -> None:
        layer = self._layer
        if self._outer is not None and layer is not None and name in self._layer_of:
            self._end_block(layer, name, module, first_tensor((args, kwargs)), first_tensor(output))
            if name == layer.outermost:
                self._layer = None
                self.on_layer(layer)
        if torch.compiler.is_compiling():
            return
        self._calls.pop(name, None)
        if name == self._outer:
            self._outer = None

    def _end_block(
        self, layer: Layer, name: str, module: nn.Module, entered: Tensor | None, x: Tensor | None
    ) -> None:
        """Keep what leaves a block: blocks end from the inside out, so the outermost is kept."""
        if layer.masks is None:
            self._unfiltered(layer, name, entered)
        attended, valid = layer.attended, None
        if attended is None or x is None:
            return
        if self.on_filter is not None and x.dim() == 2:
            valid = layer.mask((attended.batch, attended.length), x.device)
        try:
            tokens = tokens_of(x.detach(), attended, module, entered, valid)
        except AxesInDoubtError:
            layer.tokens = None
        else:
            layer.tokens = layer.tokens if tokens is None else tokens

    def _unfiltered(self, layer: Layer, block: str, entered: Tensor | None) -> None:
        """What is known of a layer whose innermost block ends, and whose filter did not run."""
        layer.masks = [[self._mask_of(layer.name)]]
        # keyword arguments need not come in the order of the parameters
        x = first_tensor(self._calls[block].given) if block in self._calls else None
        x = entered if x is None else x
        attention = self.attention[layer.name]
        width = _width(attention)
        if x is None or x.dim() > 4 or (x.dim() == 4 and _by_width(x, width) is None):
            return
        if x.dim() == 4:
            samples, tokens = _tokens_of_grid(x, _by_width(x, width)).shape[:2]
            layer.attended = Attended(samples, tokens, width)
            return
        one, other = x.shape[:2] if x.dim() == 3 else (1, len(x))
        # ids and masks among the arguments of the modules around it are (B, N)
        given = [value for call in self._calls.values() for value in call.given.values()]
        shapes = {tuple(v.shape) for v in given if isinstance(v, Tensor) and v.dim() == 2}
        is_turned = x.dim() == 3 and (other, one) in shapes and (one, other) not in shapes
        sequence_first = _is_sequence_first(attention, is_turned)
        if sequence_first and x.dim() == 3:
            one, other = other, one
        layer.attended = Attended(one, other, width, sequence_first)

    @torch.no_grad()
    def _filtered(self, name: str, filter: GraphFilter, args: Any, output: Any) -> None:
        """The hook on a filter, whose arguments show the tokens and the masks of the layer."""
        outer, layer = self._outer, self._layer
        if outer is None or args[1].is_nested:
            return
        # an attention whose forward is called by itself has no hooks, and may be in no block
        is_alone = layer is None or layer.name != name
        if layer is None or is_alone:
            self._depth += 1
            layer = Layer(name, self._depth, name, None)
        operator, v = args[0].whole(), args[1].detach()
        samples, length = v.shape[:-3], v.shape[-2]
        # tokens further apart in memory than samples were projected from (N, B, D)
        is_turned = len(samples) == 1 and v.stride(-2) > v.stride(0)
        sequence_first = _is_sequence_first(self.attention[name], is_turned)
        width = v.shape[-3:-2].numel() * v.shape[-1]
        layer.attended = Attended(samples.numel(), length, width, sequence_first)
        visible = operator.visibility()
        # False where the operator's masks hide a token from every query
        hidden = None if visible is None else _of_keys(visible.visible_keys(), v)
        layer.masks = [[self._valid], [self._mask_of(name), hidden]]
        if layer.mask((*samples, length), v.device) is None:
            # this one reads all entries of a map
            layer.masks.append([shown_by_map(operator, v)])
        if self.on_filter is not None:
            # what runs for a measurement is not followed itself
            self._outer = None
            self.on_filter(layer, filter, operator, v, output)
            self._outer = outer
        if is_alone:
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
    """A mask ``(B, N)`` as True where a token counts, without reading from the device."""
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    if not true_counts:
        # of torch: True or -inf hides
        return ~mask.bool()
    if not mask.is_floating_point():
        return mask.bool()
    # zeros and ones, or zeros and large negative numbers to add to scores
    return torch.where((mask < 0).any(), mask == 0, mask != 0)


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
    # a loop: compilers that follow the hooks know no generators
    for part in value if isinstance(value, (tuple, list)) else ():
        found = first_tensor(part)
        if found is not None:
            return found
    return None


AXES_IN_DOUBT = (
    "tokens were not measured, because their sizes do not show which axis is samples, tokens or "
    "features, or they are nested tensors or samples of several lengths in one list. If there are "
    "as many samples as tokens, take another batch size"
)


def axes_in_doubt(names: Iterable[str]) -> str:
    """The warning about layers, or the input, whose tokens were not measured."""
    return "; ".join(grouped_reasons(dict.fromkeys(names, AXES_IN_DOUBT)))


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

    def features_first_in(self, x: Tensor) -> bool | None:
        """Whether a grid is ``(B, D, H, W)``, as its sizes show; None if they do not."""
        total = self.batch * self.length
        first, last = x[:, 0].numel() == total, x[..., 0].numel() == total
        return None if first == last else first


def _is_sequence_first(attention: nn.Module, looks_so: bool) -> bool:
    """As the attention declares, or as its arguments look."""
    return getattr(attention, "batch_first", not looks_so) is False


def tokens_of(
    x: Tensor,
    attended: Attended,
    block: nn.Module,
    entered: Tensor | None = None,
    valid: Tensor | None = None,
) -> Tensor | None:
    """What enters or leaves a block, as ``(B, N, D)``, or None if it is not features of tokens.

    ``x`` is batch first, sequence first, a grid ``(B, H, W, D)`` or ``(B, D, H, W)``, or all
    samples one after another ``(ΣN, D)``, as in graph libraries. The sizes of what entered the
    block may show more than those of its output. The mask ``valid (B, N)`` separates samples of
    several lengths, which reads from the device.
    """
    shown = [like for like in (x, entered) if like is not None and like.dim() == x.dim()]
    if x.dim() == 4:
        found = [attended.features_first_in(like) for like in shown]
        # windows that reach beyond the grid have more tokens than it
        return _tokens_of_grid(x, _first([*found, _by_width(x, attended.width)]))
    if x.dim() == 3:
        is_sequence_first = _first(attended.order_of(like) for like in shown)
        if is_sequence_first is None:
            is_sequence_first = attended.sequence_first
            if is_sequence_first and not isinstance(block, _LIE_AS_DECLARED):
                # SpeechBrain's blocks are batch first around such an attention, XLNet's are not
                raise AxesInDoubtError
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


def _first(answers: Iterable[bool | None]) -> bool | None:
    return next((answer for answer in answers if answer is not None), None)


def _by_width(x: Tensor, width: int) -> bool | None:
    first, last = x.shape[1] == width, x.shape[3] == width
    return None if first == last else first


def _tokens_of_grid(x: Tensor, features_first: bool | None) -> Tensor:
    if features_first is None:
        raise AxesInDoubtError
    return x.flatten(2).mT if features_first else x.flatten(1, 2)


def _width(attention: nn.Module) -> int:
    """The features of a token that enters an attention module; 0 if no projection shows it."""
    for module in attention.modules():
        for name in ("embed_dim", "in_features", "in_channels"):
            found = getattr(module, name, None)
            if isinstance(found, int):
                return found
    return 0


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
