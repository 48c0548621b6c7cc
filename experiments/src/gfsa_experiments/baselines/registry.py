"""The comparison methods by name, with their formulas and options."""

from __future__ import annotations

import difflib
import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn

from gfsa_experiments.baselines.map_methods import AttnScale, NeuTRENO
from gfsa_experiments.baselines.token_methods import ContraNorm, FeatScale, LayerScale


@dataclass(frozen=True)
class Method:
    """A method that :func:`gfsa.baselines.apply` can apply to a model."""

    kind: type[nn.Module]
    """The module that computes it."""
    formula: str
    options: dict[str, Any]
    """The names and defaults of its options in :func:`gfsa.baselines.apply`."""
    identity_at_init: bool
    """Whether a model's outputs are unchanged when the method is applied."""


def _method(kind: type[nn.Module], formula: str, identity: bool, *options: str) -> Method:
    parameters = inspect.signature(kind).parameters
    return Method(kind, formula, {name: parameters[name].default for name in options}, identity)


METHODS: dict[str, Method] = {
    "attnscale": _method(AttnScale, "A·v + λ(A·v − M·v)", True, "lr_multiplier"),
    "contranorm": _method(
        ContraNorm,
        "bert: (1+s)x − s·S·x; vit: x − s·S·x; S = softmax(x̂x̂ᵀ/τ)",
        False,
        "scale",
        "form",
        "temperature",
    ),
    "featscale": _method(FeatScale, "y + λ1⊙mean(y) + λ2⊙(y − mean(y))", True),
    "layerscale": _method(LayerScale, "γ⊙f(x)", False, "init"),
    "neutreno": _method(NeuTRENO, "A·v + α(v⁰ − v)", False, "alpha"),
}

# methods that are filters, and how to plug each
_FILTERS = {
    "gfsa": "gfsa.plug(model)",
    "twicing": "gfsa.plug(model, filter=gfsa.Twicing)",
    "laplacian": "gfsa.plug(model, filter=gfsa.Laplacian)",
    "pagerank": "gfsa.plug(model, filter=gfsa.PageRank)",
    "polynomial": "gfsa.plug(model, filter=gfsa.Polynomial)",
}


def method_named(name: str, options: dict[str, Any]) -> Method:
    """The method called ``name``; raises if it or one of its options does not exist."""
    if name in _FILTERS:
        raise ValueError(f"{name!r} is a filter of the attention map: {_FILTERS[name]}")
    if name not in METHODS:
        similar = difflib.get_close_matches(str(name).lower(), METHODS, n=1)
        raise ValueError(
            f"there is no method {name!r}; the methods are {', '.join(METHODS)}"
            + (f". Did you mean {similar[0]!r}?" if similar else "")
        )
    method = METHODS[name]
    unknown = [option for option in options if option not in method.options]
    if unknown:
        has = ", ".join(f"{key}={value!r}" for key, value in method.options.items())
        raise ValueError(
            f"{name} has no option {', '.join(unknown)}; "
            + (f"it has {has}" if has else "it has none")
        )
    return method
