"""Hooks that make a plugged model's masks described ones, model by model.

A model makes its masks by its config's attention implementation. During the forward of a model with
plugged layers inside, its config is a view that returns the name of the mask function of
:mod:`~gfsa.adapters.transformers.masks`; outside of the forward, and for everyone else, the
config is the real one. Attention layers inside that have no filter get masks as tensors, unless
torch's attention alone reads them and they would be large.

For a static cache ``generate`` makes the masks itself, before the model's forward, by the model's
``create_masks_for_generate`` if it has one. A model with plugged layers gets one that describes the
mask of the prompt: all of its tokens and the free rows of the cache. The mask of a decoded token is
one row, made by transformers.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Any

import torch
from torch import nn
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    create_masks_for_generate,
    sdpa_mask,
)
from transformers.modeling_utils import PreTrainedModel

from gfsa.adapters.transformers.masks import NAME, DescribedMask
from gfsa.operators.blocked import rows_at_once
from gfsa.plugs.tracing.candidates import looks_like_attention

_HANDLES = "_gfsa_mask_handles"
PLUGGED = "_gfsa_handle"
_FOR_GENERATE = "create_masks_for_generate"
_CREATORS = frozenset(
    (
        "create_bidirectional_mask",
        "create_bidirectional_sliding_window_mask",
        "create_causal_mask",
        "create_masks_for_generate",
        "create_sliding_window_causal_mask",
    )
)


class ConfigView:
    """Passes everything to the real config; a subclass overrides ``_attn_implementation``."""

    real: Any

    def __init__(self, config: Any, **attributes: Any) -> None:
        for name, value in {**attributes, "real": config}.items():
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name == "real":
            # asked for while it is copied or unpickled, before it has one
            raise AttributeError(name)
        return getattr(self.real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.real, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.real, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _view, (type(self), self.__dict__)


def _view(kind: type[ConfigView], attributes: dict[str, Any]) -> ConfigView:
    return kind(attributes["real"], **attributes)


class MaskConfigView(ConfigView):
    """A model's config while it makes its masks."""

    positions_given = True
    """Whether the caller gave position ids, which may be those of packed documents; those that a
    model makes itself are of one document."""

    @property
    def _attn_implementation(self) -> str | None:
        name: str | None = self.real._attn_implementation
        # a user may have registered another mask function for sdpa
        if name == "sdpa" and ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is sdpa_mask:
            return NAME
        return name


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
        module.config = MaskConfigView(config, positions_given=positions is not None)


def _leave_view(module: Any, *_: Any) -> None:
    """After the forward, also one that raised: the config is the real one again."""
    # read once: another thread that leaves the same model may put the real one back in between
    config = module.config
    if isinstance(config, MaskConfigView):
        module.config = config.real


def _write_out(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before the forward of an attention layer without a filter: masks become what it takes."""
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
            _leave_view(module)
    makers = list(_makers(model))
    describe_for_generate(model, makers)
    for maker in makers:
        enter = maker.register_forward_pre_hook(_TakeView(maker), with_kwargs=True)
        leave = maker.register_forward_hook(_leave_view, always_call=True)
        _keep(maker, enter, leave)
        for module in maker.modules():
            if PLUGGED in module.__dict__ or _HANDLES in module.__dict__:
                continue
            if looks_like_attention(module):
                _keep(module, module.register_forward_pre_hook(_write_out, with_kwargs=True))


def _keep(module: nn.Module, *handles: Any) -> None:
    module.__dict__[_HANDLES] = (*module.__dict__.get(_HANDLES, ()), *handles)


def _makers(model: nn.Module) -> Iterator[PreTrainedModel]:
    """The models in ``model`` that make masks for plugged layers."""
    for module in model.modules():
        if not isinstance(module, PreTrainedModel) or not _makes_masks(type(module)):
            continue
        if any(PLUGGED in inner.__dict__ for inner in module.modules()):
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


class _DescribeForGenerate:
    """In place of transformers' function, for one model."""

    def __call__(self, config: Any, **arguments: Any) -> Any:
        return create_masks_for_generate(config=_OneConfig(config), **arguments)


class _OneConfig(MaskConfigView):
    """The view of a config without parts: the model's and the text's are the same."""

    def get_text_config(self, *args: Any, **kwargs: Any) -> _OneConfig:
        return self


def describe_for_generate(model: nn.Module, makers: Sequence[PreTrainedModel]) -> None:
    """Have ``generate`` describe masks for ``makers``, and for no other models in ``model``.

    Args:
        makers: the models that take a described mask, by the hooks that they have.
    """
    for module in model.modules():
        if isinstance(module.__dict__.get(_FOR_GENERATE), _DescribeForGenerate):
            del module.__dict__[_FOR_GENERATE]
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and _makes_masks_before(module, makers):
            module.__dict__[_FOR_GENERATE] = _DescribeForGenerate()


def _makes_masks_before(module: PreTrainedModel, makers: Sequence[PreTrainedModel]) -> bool:
    """Whether a model's ``generate`` makes the masks of one of ``makers``, in the usual way."""
    if not hasattr(module, "prepare_inputs_for_generation") or hasattr(module, _FOR_GENERATE):
        return False
    config = module.config
    if config.is_encoder_decoder or config.get_text_config() is not config:
        return False
    inside = set(module.modules())
    return any(maker in inside and maker.config is config for maker in makers)
