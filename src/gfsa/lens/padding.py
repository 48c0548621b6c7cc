"""Which tokens of a layer count, and which are padding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gfsa.lens.sites import containers_around, is_inside
from gfsa.lens.tokens import Arguments, arguments
from gfsa.operators import Operator

# names of masks in the arguments of models, and whether True means that a token counts
_OF_SOURCE = {"attention_mask": True, "src_key_padding_mask": False, "key_padding_mask": False}
_OF_TARGET = {"decoder_attention_mask": True, "tgt_key_padding_mask": False}

# these hand one tensor from module to module, and say nothing of masks
_CHAINS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


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
        handed_down: the mask that the modules around the layer got, see :class:`Calls`.
        operator: the attention map.
        v: ``(..., H, N, d)``.
        own: the mask of the user.
    """
    stated = (handed_down, masked_out(operator, v))
    shape = (*v.shape[:-3], v.shape[-2])
    is_known = any(mask is not None and mask.shape == shape for mask in (own, *stated))
    # reads all entries of a map
    return Padding(own, stated, None if is_known else shown_by_map(operator, v))


class Calls:
    """The calls of the modules around a model's attention that run now.

    A mask among the arguments of a model need not be about the tokens of each of its layers: there
    are decoders, and towers for images and text. It is about those of a layer if it was handed
    down to the modules around that layer.

    Args:
        model: the model.
        blocks: what :func:`gfsa.lens.sites.blocks_around` found.
    """

    def __init__(self, model: nn.Module, blocks: dict[str, list[str]]) -> None:
        self._model = model
        self._watched = {block for around in blocks.values() for block in around}
        # encoders, decoders and towers, with tokens of their own: there is attention beside them
        self._parts = {
            container
            for container in containers_around(blocks)
            if not all(name == container or is_inside(name, container) for name in blocks)
        }
        self._watched |= set(containers_around(blocks))
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
                # as many samples as tokens; or, further inside, pairs of tokens
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
                # inside of a compiled block: it has its arguments from the block
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
