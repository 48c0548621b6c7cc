"""Adapters: how a filter gets into one kind of attention module, and out again.

An adapter has one job: when the module would compute ``A·v``, it calls ``module.gfsa(operator, v)``
with an operator for A instead. The filter does the rest.
"""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal

from torch import nn

from gfsa.plugs.cross_attention import Owners

Unknown = Literal["refuse", "trace"]

CHILD = "gfsa"
"""The name under which a filter becomes a child of its attention module."""


HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead", "num_head")
"""What people call the number of heads."""


def heads_of(*places: object) -> int | None:
    """The number of heads that a module (or its config) says it has, or None if none says."""
    for place in places:
        for name in HEADS:
            heads = getattr(place, name, None)
            if isinstance(heads, int) and not isinstance(heads, bool) and heads > 0:
                return heads
    return None


class Adapter(ABC):
    """Knows one kind of attention module."""

    #: said in reports: how the filter is reached
    how = "adapter"

    @abstractmethod
    def num_heads(self, module: nn.Module) -> int:
        """Query heads of the module: a filter has numbers for each."""

    def refusal(self, name: str, module: nn.Module) -> str | None:
        """Why this module cannot take a filter (cross-attention, say), or None if it can."""
        return None

    def refusal_inside(self, owners: Owners) -> str | None:
        """The same, told by the modules that own this one, innermost first."""
        return None

    @abstractmethod
    def install(self, module: nn.Module) -> None:
        """Make the module's forward call ``module.gfsa``, which is already there."""

    @abstractmethod
    def remove(self, module: nn.Module) -> None:
        """Undo :meth:`install`; ``module.gfsa`` is still there and is taken away afterwards."""

    def mark(self, model: nn.Module) -> None:  # noqa: B027  (most have nothing to mark)
        """Called once a model after its filters have changed (plugged, unplugged or loaded)."""


class SwapClass(Adapter):
    """Plugs by giving the *instance* a subclass whose forward calls ``self.gfsa(operator, v)``.

    .. code-block:: python

        class FilteredAttention(MyAttention):
            def forward(self, x):
                q, k, v = self.project(x)
                return self.out(self.gfsa(AttentionOperator(q, k), v))

        gfsa.register_adapter(MyAttention, SwapClass(FilteredAttention, heads="num_heads"))

    The subclass adds no state and is defined at the top level of a module, so that a plugged model
    still pickles.

    Args:
        filtered: a direct or indirect subclass of the module's class.
        heads: the attribute with a module's number of query heads, or a function that gives it
            (a named one: a plugged model cannot be pickled with a lambda inside).
        refuses: gives the reason why a module cannot be plugged, or None.
    """

    def __init__(
        self,
        filtered: type[nn.Module],
        heads: str | Callable[[nn.Module], int],
        refuses: Callable[[str, nn.Module], str | None] | None = None,
    ) -> None:
        self.filtered = filtered
        self._heads = heads
        self._refuses = refuses

    def num_heads(self, module: nn.Module) -> int:
        return (
            int(getattr(module, self._heads))
            if isinstance(self._heads, str)
            else (self._heads(module))
        )

    def refusal(self, name: str, module: nn.Module) -> str | None:
        if not issubclass(self.filtered, type(module)):
            return (
                f"{type(module).__name__} is a subclass with a forward of its own that "
                f"{self.filtered.__name__} does not know; register an adapter for it"
            )
        return self._refuses(name, module) if self._refuses else None

    def install(self, module: nn.Module) -> None:
        module.__dict__["_gfsa_class"] = type(module)
        module.__class__ = self.filtered

    def remove(self, module: nn.Module) -> None:
        module.__class__ = module.__dict__.pop("_gfsa_class")


_registered: dict[type[nn.Module], Adapter] = {}

# which of our modules knows the attention of which library, the particular before the general;
# asked only if the library is loaded, since a model of it cannot exist otherwise
PROVIDERS = {
    "transformers": "gfsa.plugs.adapters.transformers.adapter",
    "timm.models": "gfsa.plugs.adapters.timm",
    "torchvision.models": "gfsa.plugs.adapters.torchvision",
    "torch_geometric.nn": "gfsa.plugs.adapters.torch_geometric",
    "speechbrain.nnet.attention": "gfsa.plugs.adapters.speechbrain",
    "gfsa.models": "gfsa.models.adapter",
    "torch": "gfsa.plugs.adapters.torch_mha",
}


def register_adapter(cls: type[nn.Module], adapter: Adapter) -> None:
    """Teach :func:`gfsa.plug` an attention class: ``adapter`` serves ``cls`` and its subclasses.

    A registered adapter goes before the built-in ones; registering ``cls`` again replaces it.
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(f"expected an nn.Module class, got {cls!r}")
    if not isinstance(adapter, Adapter):
        raise TypeError(
            f"expected a gfsa.plugs.Adapter (SwapClass, or a subclass of your own), got {adapter!r}"
        )
    _registered[cls] = adapter


def find_adapter(module: nn.Module, unknown: Unknown = "refuse") -> Adapter | None:
    """The adapter for ``module``, or None if it is not attention.

    Attention that no adapter knows gets the tracer, or with ``unknown="refuse"`` one that refuses
    it with a reason.
    """
    for cls in type(module).__mro__:
        if cls in _registered:
            return _registered[cls]
    for library, provider in PROVIDERS.items():
        if library in sys.modules:
            adapter: Adapter | None = importlib.import_module(provider).find(module)
            if adapter is not None:
                return adapter
    from gfsa.plugs.tracing.adapter import TRACER, UNKNOWN, looks_like_attention

    if looks_like_attention(module):
        return TRACER if unknown == "trace" else UNKNOWN
    return None
