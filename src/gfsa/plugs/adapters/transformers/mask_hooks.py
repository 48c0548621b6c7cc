"""Hooks that make a plugged model's masks described ones, model by model.

A model makes its masks by its config's attention implementation. During the forward of a model with
plugged layers inside, its config is a view that returns the name of the mask function of
:mod:`~gfsa.plugs.adapters.transformers.masks`; outside of the forward, and for everyone else, the
config is the real one. Attention layers inside that have no filter get masks as tensors, unless
torch's attention alone reads them and they would be large.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from gfsa.operators.blocked import rows_at_once
from gfsa.plugs.adapters.transformers.generate_masks import describe_for_generate
from gfsa.plugs.adapters.transformers.mask_view import MaskConfigView
from gfsa.plugs.adapters.transformers.masks import DescribedMask
from gfsa.plugs.tracing.candidates import looks_like_attention

_HANDLES = "_gfsa_mask_handles"
_PLUGGED = "_gfsa_handle"
_CREATORS = frozenset(
    (
        "create_bidirectional_mask",
        "create_bidirectional_sliding_window_mask",
        "create_causal_mask",
        "create_masks_for_generate",
        "create_sliding_window_causal_mask",
    )
)


class _TakeView:
    """Before the forward of a model that makes masks: its config becomes the view."""

    def __init__(self, module: nn.Module) -> None:
        names = tuple(inspect.signature(type(module).forward).parameters)[1:]
        self.place = names.index("position_ids") if "position_ids" in names else len(names)

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        config = module.config
        if isinstance(config, MaskConfigView):
            # the model is called inside of its own forward, or another thread is in it
            config = config.real
        positions = args[self.place] if len(args) > self.place else kwargs.get("position_ids")
        module.config = MaskConfigView(config, positions is not None)


class _LeaveView:
    """After the forward, also one that raised: the config is the real one again."""

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        _take_view_away(module)


def _take_view_away(module: Any) -> None:
    # read once: another thread that leaves the same model may put the real one back in between
    config = module.config
    if isinstance(config, MaskConfigView):
        module.config = config.real


class _WriteOut:
    """Before the forward of an attention layer without a filter: masks become what it takes."""

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        written = {name: _without_filter(module, value) for name, value in kwargs.items()}
        return tuple(_without_filter(module, value) for value in args), written


def _without_filter(module: Any, mask: Any) -> Any:
    """An argument of an attention layer that has no filter, with a mask that it takes."""
    if not isinstance(mask, DescribedMask):
        return mask
    visible, length = mask.visible, mask.shape[-2]
    if visible.causal and not visible.needs_rows() and getattr(module, "is_causal", False):
        # causal by itself, as in eager mode; a compiled model of transformers writes the triangle
        return None
    if not torch.compiler.is_compiling() and rows_at_once(visible, length) < length:
        return mask
    return mask.tensor()


def set_mask_hooks(model: nn.Module) -> None:
    """Give every model in ``model`` the hooks that its plugged layers need, and remove others."""
    for module in model.modules():
        for handle in module.__dict__.pop(_HANDLES, ()):
            handle.remove()
        if isinstance(module, PreTrainedModel):
            # torch calls no hook after a forward that Ctrl-C ended
            _take_view_away(module)
    makers = list(_makers(model))
    describe_for_generate(model, makers)
    for maker in makers:
        enter = maker.register_forward_pre_hook(_TakeView(maker), with_kwargs=True)
        leave = maker.register_forward_hook(_LeaveView(), always_call=True)
        _keep(maker, enter, leave)
        for module in maker.modules():
            if _PLUGGED in module.__dict__ or _HANDLES in module.__dict__:
                continue
            if looks_like_attention(module):
                _keep(module, module.register_forward_pre_hook(_WriteOut(), with_kwargs=True))


def _keep(module: nn.Module, *handles: Any) -> None:
    module.__dict__[_HANDLES] = (*module.__dict__.get(_HANDLES, ()), *handles)


def _makers(model: nn.Module) -> Iterator[PreTrainedModel]:
    """The models in ``model`` that make masks for plugged layers."""
    for module in model.modules():
        if not isinstance(module, PreTrainedModel) or not _makes_masks(type(module)):
            continue
        if any(_PLUGGED in inner.__dict__ for inner in module.modules()):
            yield module


def _makes_masks(kind: type[nn.Module]) -> bool:
    """Whether the methods of a class make masks, and do not ask for the implementation's name."""
    names: set[str] = set()
    for base in kind.__mro__:
        if base is PreTrainedModel:
            break
        for name, function in vars(base).items():
            # what is decided when a model is built, the real config decides
            if name == "__init__" or not callable(function):
                continue
            names.update(_names_in(inspect.unwrap(function)))
    return bool(names & _CREATORS) and "_attn_implementation" not in names


def _names_in(function: Any) -> set[str]:
    """Globals and attributes that a function mentions; a lambda in it may be the one that does."""
    found: set[str] = set()
    waiting = [getattr(function, "__code__", None)]
    while waiting:
        code = waiting.pop()
        if code is not None:
            found.update(code.co_names)
            waiting += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    return found
