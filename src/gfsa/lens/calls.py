"""What the modules around an attention layer were called with: the padding mask of its tokens."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gfsa.lens.sites import containers_around, is_inside
from gfsa.lens.tokens import Arguments, arguments

# names of masks in the arguments of models, and whether True means that a token counts
_OF_SOURCE = {"attention_mask": True, "src_key_padding_mask": False, "key_padding_mask": False}
_OF_TARGET = {"decoder_attention_mask": True, "tgt_key_padding_mask": False}

# containers whose forward takes no masks, whatever their modules do with them
_CHAINS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class Calls:
    """The calls of the modules around a model's attention that run now.

    A padding mask that a model is called with need not be about the tokens of every layer: there
    are decoders, and towers for images and text. It is not about those of a decoder or tower that
    was called without it.

    Args:
        model: the model.
        blocks: what :func:`gfsa.lens.sites.blocks_around` found.
    """

    def __init__(self, model: nn.Module, blocks: dict[str, list[str]]) -> None:
        self._model = model
        containers = containers_around(blocks)
        self._watched = {*containers, *itertools.chain.from_iterable(blocks.values())}
        # encoders, decoders and towers: the model has attention outside of them, on other tokens
        self._parts = {
            container
            for container in containers
            if not all(name == container or is_inside(name, container) for name in blocks)
        }
        self._running: dict[str, Arguments] = {}
        self.batch: Any = None
        """What the outermost call is made of, if that is known."""

    def watch(self) -> list[RemovableHandle]:
        """Hooks on the modules, which keep the arguments of each until it ends."""
        self._running = {}
        modules = dict(self._model.named_modules())
        handles = []
        for name in sorted(self._watched):
            module = modules[name]
            if isinstance(module, _CHAINS):
                continue
            begin, end = self._hooks(name)
            handles.append(module.register_forward_pre_hook(begin, with_kwargs=True))
            handles.append(module.register_forward_hook(end, always_call=True))
        return handles

    def mask_of(self, layer: str) -> Tensor | None:
        """The padding mask that was handed down to a layer that runs now, True where one counts."""
        around = sorted((n for n in self._running if n == layer or is_inside(layer, n)), key=len)
        calls = [(layer[len(n) :], self._running[n], n in self._parts) for n in reversed(around)]
        calls.append((layer, Arguments((), {"batch": self.batch}, passes_on=True), False))
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

    def matrices_around(self, layer: str) -> set[tuple[int, int]]:
        """The shapes of matrices among the arguments of the modules around a layer that runs."""
        return {
            (value.shape[0], value.shape[1])
            for name, call in self._running.items()
            if is_inside(layer, name)
            for value in _with_batches(call).values()
            if isinstance(value, Tensor) and value.dim() == 2
        }

    def _hooks(self, name: str) -> tuple[Any, Any]:
        def begin(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            if torch.compiler.is_compiling():
                # the compiler traces hooks inside a compiled block, whose own call has the masks
                return
            self._running[name] = arguments(module, args, kwargs)

        def end(module: nn.Module, args: Any, output: Any) -> None:
            if torch.compiler.is_compiling():
                return
            self._running.pop(name, None)

        return begin, end


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
