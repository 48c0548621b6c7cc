"""The methods that are compared: what each does to a model before it is trained."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import nn

import gfsa
from gfsa.filters.gfsa import Power
from gfsa_experiments.engine.config import as_text


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """Options of the methods; each uses those that it has."""

    K: int = 3
    learn: tuple[Literal["w0", "w1", "wK"], ...] = ("w0", "w1", "wK")
    power: Power = "extrapolated"
    w0: float = 0.0
    """Where w0 starts, or stays if it is not learned."""
    layers: Literal["all", "even", "odd"] = "all"
    filter_lr: float | None = None
    """A learning rate for what the method adds; None: the model's."""
    lr_multiplier: float = 1.0
    """The same inside the filter: coefficient = multiplier·θ."""
    degree: int = 2
    """Of ``polynomial``."""
    alpha: float = 0.15
    """Of ``pagerank``: the chance to return."""
    hops: int = 4
    """Of ``pagerank``."""
    strength: float | None = None
    """ContraNorm's s or NeuTRENO's α; None: the method's own default."""
    form: Literal["bert", "vit"] = "bert"
    """Of ContraNorm."""


@dataclass(frozen=True)
class Method:
    """One way to change a model."""

    name: str
    what: str
    apply: Callable[[nn.Module, MethodConfig], int]
    """Changes the model in place and gives the learned numbers added."""
    uses: tuple[str, ...] = ()
    """The options that it reads; others may not be set."""

    def uses_beside(self, options: MethodConfig) -> tuple[str, ...]:
        """The options that it reads if the others are these."""
        if "learn" in self.uses and "wK" not in options.learn:
            # wK stays 0: the term that K and power are about is not there
            return tuple(name for name in self.uses if name not in ("K", "power"))
        return self.uses


def _gfsa(model: nn.Module, config: MethodConfig, **changes: Any) -> int:
    arguments: dict[str, Any] = {
        "K": config.K,
        "learn": config.learn,
        "w0": config.w0,
        "power": config.power,
        "layers": config.layers,
        "lr_multiplier": config.lr_multiplier,
    }
    return gfsa.plug(model, **(arguments | changes)).parameters


def _filter(make: Callable[[MethodConfig], Any]) -> Callable[[nn.Module, MethodConfig], int]:
    def apply(model: nn.Module, config: MethodConfig) -> int:
        return gfsa.plug(model, filter=make(config), layers=config.layers).parameters

    return apply


def _baseline(name: str, strength: str = "") -> Callable[[nn.Module, MethodConfig], int]:
    def apply(model: nn.Module, config: MethodConfig) -> int:
        from gfsa import baselines

        given: dict[str, Any] = {} if config.strength is None else {strength: config.strength}
        if name == "contranorm":
            given["form"] = config.form
        added: int = baselines.apply(model, name, layers=config.layers, **given).parameters
        return added

    return apply


def _polynomial(config: MethodConfig) -> Callable[[int], gfsa.Polynomial]:
    return lambda heads: gfsa.Polynomial(heads, config.degree, config.lr_multiplier)


def _pagerank(config: MethodConfig) -> Callable[[int], gfsa.PageRank]:
    return lambda heads: gfsa.PageRank(heads, config.alpha, config.hops)


_LEARNED = ("layers", "filter_lr", "lr_multiplier")
_OF_GFSA = ("K", "learn", "w0", "power", *_LEARNED)

METHODS = {
    method.name: method
    for method in (
        Method("plain", "the model as it is", lambda model, config: 0),
        Method("gfsa", "w0·I + w1·A + wK·A^K in every layer", _gfsa, _OF_GFSA),
        Method(
            "gfsa-even",
            "the same in every second layer",
            lambda model, config: _gfsa(model, config, layers="even"),
            tuple(name for name in _OF_GFSA if name != "layers"),
        ),
        Method(
            "gfsa-published",
            "wK alone is learned, as published (dropout acts on A, as everywhere here)",
            lambda model, config: _gfsa(model, config, learn=("wK",)),
            tuple(name for name in _OF_GFSA if name != "learn"),
        ),
        Method(
            "degree1",
            "w0·I + w1·A: no second pass",
            lambda model, config: _gfsa(model, config, K=None, learn=("w0", "w1")),
            ("w0", *_LEARNED),
        ),
        Method("polynomial", "Σ c_k·A^k", _filter(_polynomial), ("degree", *_LEARNED)),
        Method("twicing", "2A − A²", _filter(lambda config: gfsa.Twicing), ("layers",)),
        Method(
            "pagerank", "personalised PageRank", _filter(_pagerank), ("alpha", "hops", "layers")
        ),
        Method(
            "contranorm",
            "X − s·softmax(X·Xᵀ)·X after attention",
            _baseline("contranorm", "scale"),
            ("strength", "form", "layers"),
        ),
        Method(
            "attnscale",
            "M + (1+λ)(A − M), M the mean",
            _baseline("attnscale"),
            ("layers", "filter_lr"),
        ),
        Method(
            "featscale",
            "y + λ1·mean(y) + λ2·(y − mean(y))",
            _baseline("featscale"),
            ("layers", "filter_lr"),
        ),
        Method(
            "neutreno",
            "A·V + α(V⁰ − V)",
            _baseline("neutreno", "alpha"),
            ("strength", "layers"),
        ),
        Method("layerscale", "γ ⊙ branch", _baseline("layerscale"), ("layers", "filter_lr")),
    )
}


def find_method(name: str) -> Method:
    if name not in METHODS:
        raise ValueError(f"there is no method {name!r}; there are {', '.join(METHODS)}")
    return METHODS[name]


def options_of(method: Method, config: MethodConfig) -> dict[str, Any]:
    """The options that differ from the defaults, all of which the method must use."""
    if config.filter_lr is not None and not 0 <= config.filter_lr < math.inf:
        raise ValueError(f"filter_lr must be a number of at least 0, got {config.filter_lr}")
    defaults = MethodConfig()
    changed = {
        field.name: getattr(config, field.name)
        for field in fields(config)
        if getattr(config, field.name) != getattr(defaults, field.name)
    }
    for name in changed:
        if name not in method.uses:
            known = ", ".join(method.uses) or "none"
            raise ValueError(f"method {method.name} has no option {name!r}; its options: {known}")
    return changed


def check_options(name: str, options: MethodConfig) -> None:
    """Raise ValueError for options with which a method fits no model at all."""
    method = find_method(name)
    told = as_text(options_of(method, options))
    if not options.learn:
        raise ValueError(
            "learn names what a filter learns, some of w0, w1 and wK by commas, got nothing; "
            "--method plain is the model without a filter"
        )
    try:
        _try(method, options, _stand_in())
    except ValueError as error:
        # the filter may have another name for an option than the command line
        raise ValueError(f"method {name} cannot take {told}: {error}") from error


def check_fit(name: str, options: MethodConfig, model: nn.Module, what: str) -> None:
    """Raise ValueError if a method cannot be put into a model, which is spent on the attempt.

    Args:
        model: on the device ``meta``, say.
        what: what to call it.
    """
    try:
        _try(find_method(name), options, model)
    except ValueError as error:
        # a line for every layer would bury the reason
        first, *layers = str(error).splitlines()
        reasons = "\n".join([first, *layers[:2], *(["  …"] if layers[2:] else [])])
        raise ValueError(f"method {name} cannot be put into {what}: {reasons}") from error
    except RuntimeError:
        # it takes numbers, which a sketch has not: the run will tell
        return


def _try(method: Method, options: MethodConfig, model: nn.Module) -> None:
    with warnings.catch_warnings():
        # whatever there is to be said about a model is said when it is trained
        warnings.simplefilter("ignore")
        method.apply(model, options)


def _stand_in() -> nn.Module:
    """A model that every method fits, without memory and without random numbers."""
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def added_parameters(model: nn.Module) -> list[nn.Parameter]:
    """What a method has put into the model for learning."""
    found = [p for f in gfsa.filters_of(model).values() for p in f.parameters()]
    # a model has baselines in it only where they were asked for
    baselines = sys.modules.get("gfsa.baselines")
    theirs = baselines.parameters_of(model) if baselines is not None else []
    known = {id(p) for p in found}
    return found + [p for p in theirs if id(p) not in known]
