"""Which adapter serves an attention module: registered ones, built-in ones, then the tracer."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Literal

from torch import Tensor, nn

from gfsa.plugs.adapter import Adapter, SwapClass
from gfsa.plugs.tracing.adapter import KNOWN_TRACER, TRACER, UNKNOWN, TracerAdapter
from gfsa.plugs.tracing.candidates import looks_like_attention, may_be_attention

Unknown = Literal["refuse", "trace"]
"""What to do with attention that no adapter knows."""

_registered: dict[type[nn.Module], Adapter] = {}


def register_adapter(cls: type[nn.Module], adapter: Adapter) -> None:
    """Teach :func:`gfsa.plug` an attention class: ``adapter`` serves ``cls`` and its subclasses.

    A registered adapter takes precedence over the built-in ones; registering ``cls`` again
    replaces it.

    Args:
        cls: the class of the attention module.
        adapter: a :class:`gfsa.plugs.SwapClass`, or a subclass of your own of
            :class:`gfsa.plugs.Adapter`.

    Raises:
        TypeError: if ``cls`` is not an ``nn.Module`` class, ``adapter`` is not an adapter, or the
            class of a ``SwapClass`` is not a subclass of ``cls``.
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(f"expected an nn.Module class, got {cls!r}")
    if not isinstance(adapter, Adapter):
        raise TypeError(
            f"expected a gfsa.plugs.Adapter (SwapClass, or a subclass of your own), got {adapter!r}"
        )
    if isinstance(adapter, SwapClass) and not issubclass(adapter.filtered, cls):
        raise TypeError(
            f"SwapClass({adapter.filtered.__name__}) cannot serve {cls.__name__}: expected a "
            f"subclass of it, as in class {adapter.filtered.__name__}({cls.__name__})"
        )
    _registered[cls] = adapter


def is_registered(adapter: Adapter) -> bool:
    """Whether an adapter is one of the user's own; the tracer, which follows axes, is not."""
    return adapter in _registered.values() and not isinstance(adapter, TracerAdapter)


def find_adapter(module: nn.Module, unknown: Unknown = "refuse") -> Adapter | None:
    """The adapter for ``module``, or None if it is not attention.

    Attention that no adapter knows gets the tracer, or with ``unknown="refuse"`` an adapter that
    refuses it with a reason.
    """
    for cls in type(module).__mro__:
        if cls in _registered:
            return _registered[cls]
    adapter = _find_built_in(module)
    if adapter is not None:
        return adapter
    if looks_like_attention(module):
        return TRACER if unknown == "trace" else UNKNOWN
    return UNKNOWN if may_be_attention(module) else None


OLDEST_TRANSFORMERS = (5, 15)
"""The oldest version of transformers whose models are plugged, as declared in pyproject.toml."""


def example_inputs(model: nn.Module) -> Tensor | None:
    """A batch for a trial forward of a model of timm, if it says what it takes."""
    from gfsa.adapters.timm import example_images

    return example_images(model)


def _find_in_transformers(module: nn.Module) -> Adapter | None:
    version: str = sys.modules["transformers"].__version__
    if tuple(map(int, version.split(".")[:2])) < OLDEST_TRANSFORMERS:
        # the adapter cannot be imported; modules of other libraries do not need it
        # its own, derived from one of them, or loaded with a checkpoint
        libraries = {cls.__module__.partition(".")[0] for cls in type(module).__mro__}
        is_its = not libraries.isdisjoint(("transformers", "transformers_modules"))
        if is_its and looks_like_attention(module):
            oldest = ".".join(map(str, OLDEST_TRANSFORMERS))
            raise ImportError(
                f"gfsa plugs {type(module).__name__} of transformers {oldest} or newer, but "
                f"transformers {version} is installed: pip install -U 'transformers>={oldest}'"
            )
        return None
    from gfsa.adapters.transformers.adapter import find

    return find(module)


# library → its adapter, which is imported when a model has a module of the library's own
_OF_LIBRARY = {
    "diffusers": "gfsa.adapters.diffusers",
    "timm": "gfsa.adapters.timm",
}
# classes that the tests have traced; those of timm's ViT and Swin are for versions whose forward
# the adapter does not know
_TRACED = {
    "litgpt.lora": ("CausalSelfAttention",),
    "litgpt.model": ("CausalSelfAttention",),
    "speechbrain.nnet.attention": ("RelPosMHAXL", "RoPEMHA"),
    "timm.layers.attention": ("Attention", "AttentionRope"),
    "timm.models.beit": ("Attention",),
    "timm.models.cait": ("TalkingHeadAttn",),
    "timm.models.eva": ("EvaAttention",),
    "timm.models.swin_transformer": ("WindowAttention",),
    "timm.models.swin_transformer_v2": ("WindowAttention",),
    "timm.models.swin_transformer_v2_cr": ("WindowMultiHeadAttention",),
    "timm.models.tnt": ("Attention",),
    "timm.models.vision_transformer": ("Attention",),
    "timm.models.vision_transformer_relpos": ("RelPosAttention",),
    "torchvision.models.swin_transformer": ("ShiftedWindowAttention", "ShiftedWindowAttentionV2"),
}


def _find_built_in(module: nn.Module) -> Adapter | None:
    """The library's adapter for a module; specific libraries come before torch."""
    # a model of transformers may have attention classes of the user's own
    found = _find_in_transformers(module) if "transformers" in sys.modules else None
    cls = type(module)
    library = cls.__module__.partition(".")[0]
    if found is None and library in _OF_LIBRARY:
        found = import_module(_OF_LIBRARY[library]).find(module)
    if found is None and cls.__name__ in _TRACED.get(cls.__module__, ()):
        return KNOWN_TRACER
    if found is None:
        from gfsa.adapters.torch_mha import find

        found = find(module)
    return found
