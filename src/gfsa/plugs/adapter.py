"""Adapters: how a filter is installed into one kind of attention module, and removed again.

An adapter has one job: where the module would compute ``A·v``, it calls
``module.gfsa(operator, v)`` with an operator for A instead. The filter does the rest.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

if TYPE_CHECKING:
    from gfsa.plugs.tracing.candidates import Owners

CHILD = "gfsa"
"""The name under which a filter becomes a child of its attention module."""

# what gfsa writes into the __dict__ of a plugged module; an adapter may add keys of its own
ADAPTER = "_gfsa_adapter"
"""The adapter of the module."""
CLASS = "_gfsa_class"
"""The class that the module had, if plugging gave it another one."""
NAME = "_gfsa_name"
"""The module's name in its model, for errors of its forward."""
GIVEN_COPIES = "_gfsa_given_copies"
"""Set if the module was once called with equal tokens in two tensors."""

HEADS = (
    *("num_heads", "num_attention_heads", "n_heads", "n_head"),
    *("heads", "nhead", "num_head", "attention_heads"),
)
"""Attribute names under which libraries keep the number of heads."""


def heads_of(*holders: object) -> int | None:
    """The number of heads that a module (or its config) states, or None if none of them does."""
    with warnings.catch_warnings():
        # a model of diffusers warns if an attribute is read that only its config has
        warnings.simplefilter("ignore", FutureWarning)
        for holder in holders:
            for name in HEADS:
                heads = getattr(holder, name, None)
                if isinstance(heads, int) and not isinstance(heads, bool) and heads > 0:
                    return heads
    return None


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module, plugged or not, without its filter."""
    kind: type[nn.Module] = module.__dict__.get(CLASS, type(module))
    return kind


class Adapter(ABC):
    """Installs filters into one kind of attention module."""

    #: shown in reports: how the module's forward calls the filter
    how = "adapter"

    @abstractmethod
    def num_heads(self, module: nn.Module) -> int:
        """The number of query heads: a filter has coefficients for each."""

    def refusal(self, name: str, module: nn.Module) -> str | None:
        """Why this module cannot take a filter (cross-attention, say), or None if it can."""
        return None

    def refusal_inside(self, owners: Owners) -> str | None:
        """The same, decided by the modules that contain this one, innermost first."""
        return None

    @abstractmethod
    def install(self, module: nn.Module) -> None:
        """Make the module's forward call ``module.gfsa``, which is already there.

        If this raises, gfsa puts back the class, the attributes, the children and the hooks of
        every module of the model.
        """

    @abstractmethod
    def remove(self, module: nn.Module) -> None:
        """Undo :meth:`install`; ``module.gfsa`` is still there and is deleted afterwards."""

    def on_filters_changed(self, model: nn.Module) -> None:  # noqa: B027  (most need not know)
        """Called once per model after filters were plugged, unplugged or loaded."""


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
        heads: the attribute that holds a module's number of query heads, or a function that
            returns it (not a lambda: a plugged model with a lambda inside cannot be pickled).
        refuses: returns the reason why a module cannot be plugged, or None.
    """

    def __init__(
        self,
        filtered: type[nn.Module],
        heads: str | Callable[[nn.Module], int],
        refuses: Callable[[str, nn.Module], str | None] | None = None,
    ) -> None:
        if not (isinstance(filtered, type) and issubclass(filtered, nn.Module)):
            raise TypeError(
                "SwapClass takes a subclass of the attention class, whose forward calls "
                f"self.gfsa(operator, v); got {filtered!r:.80}"
            )
        self.filtered = filtered
        self._heads = heads
        self._refuses = refuses

    def num_heads(self, module: nn.Module) -> int:
        if isinstance(self._heads, str):
            return int(getattr(module, self._heads))
        return self._heads(module)

    def refusal(self, name: str, module: nn.Module) -> str | None:
        replaced = refusal_of_own_forward(module)
        if replaced is not None:
            return replaced
        if is_parametrized(module):
            return (
                f"torch.nn.utils.parametrize made the class {type(module).__name__} for this "
                "module: plug first, then parametrize"
            )
        if isinstance(self._heads, str) and not hasattr(module, self._heads):
            return (
                f"{type(module).__name__} has no attribute {self._heads!r} for its number of "
                "heads; name the right one in SwapClass(heads=…), or pass a function of the module"
            )
        if not issubclass(self.filtered, type(module)):
            own, filtered = type(module).__name__, self.filtered.__name__
            return (
                f"{own} is a subclass that {filtered} does not inherit from, so what it changes "
                f"would be lost; register an adapter for it, with a class "
                f"Filtered{own}({filtered}, {own}), whose forward has to do what that of {own} does"
            )
        return self._refuses(name, module) if self._refuses else None

    def install(self, module: nn.Module) -> None:
        module.__dict__[CLASS] = type(module)
        module.__class__ = self.filtered

    def remove(self, module: nn.Module) -> None:
        module.__class__ = module.__dict__.pop(CLASS)


def refusal_of_own_forward(module: nn.Module) -> str | None:
    """Why another class would not change what this instance computes, or None if it would."""
    if "forward" not in module.__dict__ or has_bound_forward(module):
        return None
    return (
        f"this {type(module).__name__} has a forward of its own, which the forward of a class does "
        "not replace (accelerate's hooks set one): plug first, then offload or dispatch the model"
    )


def has_bound_forward(module: nn.Module) -> bool:
    """Whether the instance has its class's own forward as an attribute.

    accelerate leaves that behind when its hooks are removed. It changes nothing, until the module
    gets another class.
    """
    own: Any = module.__dict__.get("forward")
    return getattr(own, "__func__", None) is type(module).forward and own.__self__ is module


def names_in_forward(cls: Any) -> str:
    """The names that the forward of a class looks up (attributes, methods, functions), sorted.

    An adapter that repeats a library's forward keeps the names it was written for. Where the
    installed version looks up others, the module is traced, so that nothing new is left out.
    """
    return " ".join(sorted(cls.forward.__code__.co_names))
