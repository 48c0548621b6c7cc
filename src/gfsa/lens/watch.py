"""Hooks that find the tokens which leave each layer of a model, and their padding."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gfsa.filters import GraphFilter
from gfsa.lens.tokens import (
    Attended,
    AxesInDoubtError,
    Padding,
    attended_by_input,
    attended_by_values,
    first_tensor,
    padding_of,
    tokens_of,
)
from gfsa.operators import Operator
from gfsa.plugs.sites import accepting_sites, filters_of, sites


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every self-attention module of the model that has a filter or can have one, by name."""
    accepting = accepting_sites(model, sites(model))
    return {name: site.module for name, site in accepting.items()}


@dataclass
class Layer:
    """One run of an attention module: models such as ALBERT run one module at every depth."""

    name: str
    depth: int
    """Its number among the layers of the model, from 1."""
    attended: Attended | None
    """None if it cannot be told what the attention attends to."""
    padding: Padding
    entered: tuple[nn.Module, Tensor] | None
    """Of the first layer: the outermost block around it, and what it was called with."""
    tokens: Tensor | None = None
    """What leaves the outermost block around it, ``(B, N, D)``; None if its axes are in doubt."""
    has_ended: bool = False
    """Whether the attention module has returned."""


OnLayer = Callable[[Layer], None]
OnFilter = Callable[[Layer, GraphFilter, Operator, Tensor, Tensor], None]


class Watch:
    """Hooks on a model that follow its layers, between :meth:`start` and :meth:`stop`.

    The outermost part of the model that runs counts as the model: a ``LightningModule`` is not
    called itself where its ``training_step`` calls ``self.net(x)``.

    Args:
        model: the model.
        attention: its attention modules, by name.
        on_layer: called with a layer when it is over.
        on_filter: called after a layer's filter with the layer, the filter, its operator and
            values, and its output.
        reads: whether numbers may be read from the device, which waits for it.
    """

    def __init__(
        self,
        model: nn.Module,
        attention: Mapping[str, nn.Module],
        on_layer: OnLayer,
        on_filter: OnFilter | None = None,
        reads: bool = False,
    ) -> None:
        self.model = model
        self.attention = attention
        self.on_layer = on_layer
        self.on_filter = on_filter
        self.reads = reads
        blocks = _blocks_around(model, attention)
        self._layer_of = {block: name for name, around in blocks.items() for block in around}
        self._containers = _containers_around(blocks)
        # encoders, decoders and towers: the model has attention outside of them, on other tokens
        self._parts = {
            container
            for container in self._containers
            if not all(name == container or _is_inside(name, container) for name in blocks)
        }
        self._handles: list[RemovableHandle] = []

    @property
    def is_on(self) -> bool:
        """Whether the model has hooks."""
        return bool(self._handles)

    def start(self, valid: Tensor | None = None, batch: Any = None) -> None:
        """Add the hooks.

        Args:
            valid: ``(B, N)``, True where a token counts; overrides all other masks.
            batch: what the model is called with; a padding mask in it counts as one it was given.
        """
        self.stop()
        self._valid = valid
        self._batch = Arguments((), {"batch": batch}, passes_on=True)
        # what the modules that run now were called with
        self._calls: dict[str, Arguments] = {}
        # the outermost container that runs now, and those that ran before
        self._outer: str | None = None
        self._ran: set[str] = set()
        self._layer: Layer | None = None
        self._depth = 0
        self._entered: tuple[nn.Module, Tensor] | None = None
        modules = dict(self.model.named_modules())
        for name in dict.fromkeys((*self._containers, *self._layer_of)):
            module = modules[name]
            self._handles += [
                module.register_forward_pre_hook(self._enter(name), with_kwargs=True),
                module.register_forward_hook(self._leave(name), with_kwargs=True),
            ]
        for name, filter in filters_of(self.model).items():
            self._handles.append(filter.register_forward_hook(self._filter(name)))

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _enter(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            if torch.compiler.is_compiling():
                # the compiler traces hooks inside a compiled block, whose own call has the masks
                return
            self._calls[name] = arguments(module, args, kwargs)
            if name in self._containers:
                self._begin_forward(name)
            found = first_tensor((args, kwargs))
            if self._outer is None or found is None or name not in self._layer_of:
                return
            # the first block to begin is the outermost block around the first attention
            if self._layer is None and self._entered is None:
                self._entered = (module, found)

        return hook

    def _begin_forward(self, name: str) -> None:
        if self._outer not in (None, name):
            return
        # what is checkpointed runs again in the backward, when the forward around it is over
        if any(_is_inside(name, container) for container in self._ran):
            return
        self._outer, self._layer, self._entered = name, None, None
        self._ran.add(name)
        # the layers of the model before the first one inside of this part
        inside = [other == name or _is_inside(other, name) for other in self.attention]
        self._depth = inside.index(True) if True in inside else 0

    def _leave(self, name: str) -> Callable[..., None]:
        @torch.no_grad()
        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            if self._outer is not None and name in self._layer_of:
                self._end_block(self._layer_of[name], name, module, (args, kwargs), output)
            if torch.compiler.is_compiling():
                return
            self._calls.pop(name, None)
            if name == self._outer:
                self._end_layer()
                self._outer = None

        return hook

    def _end_block(self, name: str, block: str, module: nn.Module, call: Any, output: Any) -> None:
        """Keep what leaves a block: blocks end from the inside out, so the outermost is kept."""
        entered, layer, is_attention = first_tensor(call), self._layer, block == name
        if layer is None or layer.name != name or (is_attention and layer.has_ended):
            layer = self._begin_unfiltered(name, block, entered)
        layer.has_ended |= is_attention
        found = first_tensor(output)
        if layer.attended is None or found is None:
            return
        attended, valid = layer.attended, None
        if self.reads and found.dim() == 2:
            valid = layer.padding.of((attended.batch, attended.length), found.device)
        try:
            tokens = tokens_of(found.detach(), attended, module, entered, valid)
        except AxesInDoubtError:
            layer.tokens = None
        else:
            layer.tokens = layer.tokens if tokens is None else tokens

    def _begin_unfiltered(self, name: str, block: str, entered: Tensor | None) -> Layer:
        """The layer whose innermost block has ended, and whose filter did not run."""
        # keyword arguments need not come in the order of the parameters
        x = first_tensor(self._calls[block].given) if block in self._calls else None
        try:
            attended = attended_by_input(
                self.attention[name], entered if x is None else x, self._matrices_around(name)
            )
        except AxesInDoubtError:
            attended = None
        return self._begin_layer(name, attended, Padding(stated=[self.mask_of(name)]))

    def _filter(self, name: str) -> Callable[..., None]:
        """The hook on a filter, whose arguments show the tokens and the masks of the layer."""

        @torch.no_grad()
        def hook(filter: nn.Module, args: Any, output: Any) -> None:
            if self._outer is None or args[1].is_nested:
                return
            operator, v = args[0].whole(), args[1].detach()
            attended = attended_by_values(self.attention[name], v)
            padding = padding_of(self.mask_of(name), operator, v, self._valid)
            layer = self._begin_layer(name, attended, padding)
            if self.on_filter is not None:
                assert isinstance(filter, GraphFilter)
                # what runs for a measurement is not followed itself
                outer, self._outer = self._outer, None
                self.on_filter(layer, filter, operator, v, output)
                self._outer = outer

        return hook

    def _begin_layer(self, name: str, attended: Attended | None, padding: Padding) -> Layer:
        self._end_layer()
        self._depth += 1
        entered, self._entered = self._entered, None
        self._layer = Layer(name, self._depth, attended, padding, entered)
        return self._layer

    def _end_layer(self) -> None:
        layer, self._layer = self._layer, None
        if layer is not None:
            self.on_layer(layer)

    def mask_of(self, layer: str) -> Tensor | None:
        """The padding mask that was handed down to a layer that runs now, True where one counts.

        A padding mask that a model is called with need not be about the tokens of every layer:
        there are decoders, and towers for images and text. It is not about those of a decoder or
        tower that was called without it.
        """
        around = sorted((n for n in self._calls if n == layer or _is_inside(layer, n)), key=len)
        calls = [(layer[len(n) :], self._calls[n], n in self._parts) for n in reversed(around)]
        calls.append((layer, self._batch, False))
        square = None
        for path, call, is_part in calls:
            mask = _mask_among(call, path)
            if mask is not None:
                if mask.shape[0] != mask.shape[1]:
                    return mask
                # (B, N) of as many samples as tokens, or pairs (N, N) that an inner module made:
                # the outermost is the padding mask
                square = mask
            elif is_part and not _got_another_mask(call, path):
                break
        return square

    def _matrices_around(self, layer: str) -> set[tuple[int, ...]]:
        """The shapes of matrices among the arguments of the modules around a layer that runs."""
        return {
            tuple(value.shape)
            for name, call in self._calls.items()
            if _is_inside(layer, name)
            for value in _with_batches(call).values()
            if isinstance(value, Tensor) and value.dim() == 2
        }


class Arguments(NamedTuple):
    """What a module was called with."""

    takes: tuple[str, ...]
    """The parameters of its forward."""
    given: dict[str, Any]
    """By name, in the order of the parameters. What only ``*args`` takes is not here."""
    passes_on: bool
    """Whether its forward has ``*args``: a wrapper, whose arguments have names further inside."""


def arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Bind the arguments of a call to the names of the forward's parameters."""
    kinds = inspect.Parameter
    if isinstance(module, nn.Sequential):
        # it takes no masks, whatever its modules do with them
        return Arguments((), {}, passes_on=True)
    try:
        parameters = inspect.signature(module.forward).parameters
    except (TypeError, ValueError):
        # compiled code, whose parameters have no names
        return Arguments((), kwargs, passes_on=True)
    named = (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    positional = [name for name, p in parameters.items() if p.kind in named]
    given = {**dict(zip(positional, args, strict=False)), **kwargs}
    order = [name for name in parameters if name in given]
    order += [name for name in given if name not in parameters]
    return Arguments(
        takes=tuple(parameters),
        given={name: given[name] for name in order},
        passes_on=any(p.kind is kinds.VAR_POSITIONAL for p in parameters.values()),
    )


# names of masks in the arguments of models, and whether True means that a token counts
_OF_SOURCE = {"attention_mask": True, "src_key_padding_mask": False, "key_padding_mask": False}
_OF_TARGET = {"decoder_attention_mask": True, "tgt_key_padding_mask": False}


def _mask_among(call: Arguments, path: str) -> Tensor | None:
    """The padding mask in the arguments of a module, for its layer at ``path`` inside of it."""
    given = _with_batches(call)
    for name in _masks_taken(call, path):
        mask = given.get(name)
        if isinstance(mask, Tensor) and mask.dim() == 2:
            return _counting(mask, {**_OF_SOURCE, **_OF_TARGET}[name])
    return None


def _got_another_mask(call: Arguments, path: str) -> bool:
    """Whether a mask may have come in another form: pairs or a description, made further out."""
    given = _with_batches(call)
    names = _masks_taken(call, path) or [name for name in given if "mask" in name]
    return call.passes_on or any(given.get(name) is not None for name in names)


def _masks_taken(call: Arguments, path: str) -> list[str]:
    """The names of masks in a module's call that are about the layer at ``path`` inside of it."""
    given = _with_batches(call)
    source, target = (
        [name for name in names if name in call.takes or name in given]
        for names in (_OF_SOURCE, _OF_TARGET)
    )
    if source and target:
        return target if "decoder" in path else source
    return source + target


def _with_batches(call: Arguments) -> dict[str, Any]:
    """The arguments of a call, and what is in those that are a whole batch."""
    given: dict[str, Any] = {}
    for name, value in call.given.items():
        given |= {name: value} | (dict(value) if isinstance(value, Mapping) else {})
    return given


def _counting(mask: Tensor, counts: bool) -> Tensor:
    """A mask as bool, True where a token counts; without reading a number from the device."""
    if not counts:
        # of torch: True or -inf hides
        return ~mask.bool()
    if not mask.is_floating_point():
        return mask.bool()
    # zeros and ones, or zeros and large negative numbers to add to scores
    return torch.where((mask < 0).any(), mask == 0, mask != 0)


def _blocks_around(model: nn.Module, attention: Iterable[str]) -> dict[str, list[str]]:
    """For each attention module, the names of the blocks that contain no other attention.

    Innermost first, beginning with the attention module itself. A block is an element of a
    ``ModuleList``, ``Sequential`` or ``ModuleDict``: what a model repeats with depth.
    """
    modules = dict(model.named_modules())
    names = list(attention)
    found = {}
    for name in names:
        parts = name.split(".")
        blocks = [name]
        for end in range(len(parts) - 1, 0, -1):
            around = ".".join(parts[:end])
            if sum(other == name or other.startswith(around + ".") for other in names) > 1:
                break
            parent = modules[".".join(parts[: end - 1])]
            repeats = isinstance(parent, (nn.ModuleList, nn.Sequential, nn.ModuleDict))
            if repeats and not isinstance(modules[around], (nn.ModuleList, nn.ModuleDict)):
                blocks.append(around)
        found[name] = blocks
    return found


def _containers_around(blocks: dict[str, list[str]]) -> set[str]:
    """The names of the model, ``""``, and of all modules in it that contain blocks."""
    containers = {""}
    for name, around in blocks.items():
        parts = name.split(".")
        inside = [".".join(parts[:end]) for end in range(1, len(parts))]
        outside = min((inside.index(block) for block in around if block in inside), default=None)
        containers.update(inside[:outside])
    return containers


def _is_inside(name: str, container: str) -> bool:
    """Whether the module ``name`` is inside of the module ``container``; no module is in itself."""
    return name != container and (not container or name.startswith(container + "."))
