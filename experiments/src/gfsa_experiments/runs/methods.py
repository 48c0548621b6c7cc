"""The methods that are compared: the change that each makes to a model before training."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import nn

import gfsa
from gfsa.filters.gfsa import Power
from gfsa_experiments import baselines
from gfsa_experiments.engine.config import NotNegative, as_text, check_bounds


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """The options of all methods; a method reads some of them."""

    K: int = 3
    learn: tuple[Literal["w0", "w1", "wK"], ...] = ("w0", "w1", "wK")
    power: Power = "extrapolated"
    w0: float = 0.0
    """The initial w0, which stays if it is not learned."""
    layers: Literal["all", "even", "odd", "lower", "upper"] = "all"
    filter_lr: NotNegative | None = None
    """The learning rate of the parameters that the method adds; None: the model's."""
    lr_multiplier: float = 1.0
    """A factor inside the filter: coefficient = multiplier·θ."""
    degree: int = 2
    """Of ``polynomial``."""
    alpha: float = 0.15
    """Of ``pagerank``: the probability of a restart."""
    hops: int = 4
    """Of ``pagerank``."""
    strength: float | None = None
    """ContraNorm's s or NeuTRENO's α; None: the method's own default."""
    form: Literal["bert", "vit"] = "bert"
    """Of ContraNorm."""
    share: Literal["none", "fixed", "learned"] = "none"
    """The exclusive term beside a filter: with a share of 1, or one per head learned from 0."""
    first_values: bool = False
    """Add the first layer's values to those of the layers above, r per head learned from 0."""


@dataclass(frozen=True)
class Method:
    """A change of a model, by name."""

    name: str
    what: str
    apply: Callable[[nn.Module, MethodConfig], int]
    """Changes the model in place and returns how many trainable numbers it added."""
    uses: tuple[str, ...] = ()
    """The options that it reads; setting another one is an error."""

    def used_options(self, options: MethodConfig) -> tuple[str, ...]:
        """The options that have an effect, given the values of the others."""
        if "learn" in self.uses and "wK" not in options.learn:
            # wK stays 0, so there is no term of order K
            return tuple(name for name in self.uses if name not in ("K", "power"))
        return self.uses


def _gfsa(model: nn.Module, config: MethodConfig, layers: Any = None, **changes: Any) -> int:
    arguments: dict[str, Any] = {
        "K": config.K,
        "learn": config.learn,
        "w0": config.w0,
        "power": config.power,
        "lr_multiplier": config.lr_multiplier,
    }
    arguments |= changes
    return _plug(model, config, lambda heads: gfsa.GFSA(heads, **arguments), layers)


def _filter(make: Callable[[MethodConfig], Any]) -> Callable[[nn.Module, MethodConfig], int]:
    return lambda model, config: _plug(model, config, make(config))


def _plug(model: nn.Module, config: MethodConfig, make: Any, layers: Any = None) -> int:
    """Plug a filter with the terms that are asked for beside it."""

    def build(heads: int) -> gfsa.GraphFilter:
        built: gfsa.GraphFilter = make(heads)
        if config.share == "none":
            return built
        learned = config.share == "learned"
        return built.exclude(0.0 if learned else 1.0, learned)

    layers = config.layers if layers is None else layers
    return gfsa.plug(model, filter=build, layers=layers, depth=config.first_values).parameters


def _attention(model: nn.Module, config: MethodConfig, **terms: Any) -> int:
    """``A·V`` itself, without learned coefficients, for terms beside it."""
    config = replace(config, **terms)
    fixed: dict[str, Any] = {
        "K": None,
        "learn": (),
        "w0": config.w0,
        "lr_multiplier": config.lr_multiplier,
    }
    return _plug(model, config, lambda heads: gfsa.GFSA(heads, **fixed))


def _baseline(name: str, strength: str = "") -> Callable[[nn.Module, MethodConfig], int]:
    def apply(model: nn.Module, config: MethodConfig) -> int:
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


_LEARNED = ("layers", "filter_lr", "lr_multiplier", "share", "first_values")
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
        Method(
            "exclusive",
            "A·v − p·v: without the part along the token's own v",
            lambda model, config: _attention(
                model, config, share="fixed" if config.share == "none" else config.share
            ),
            ("w0", *_LEARNED),
        ),
        Method(
            "depth",
            "A·(v + r·v⁰): with the first layer's values",
            lambda model, config: _attention(model, config, first_values=True),
            ("w0", *_LEARNED),
        ),
        Method(
            "fixed-identity",
            "A − s·I with a fixed s",
            lambda model, config: _attention(
                model, config, w0=-(0.4 if config.strength is None else config.strength)
            ),
            ("strength", "layers"),
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


def changed_options(method: Method, config: MethodConfig) -> dict[str, Any]:
    """The options that differ from their defaults; the method must read all of them."""
    check_bounds(config)
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
    """Raise ValueError for options that the method accepts for no model."""
    method = find_method(name)
    given = as_text(changed_options(method, options))
    if not options.learn:
        raise ValueError(
            "learn lists the coefficients that a filter learns (w0,w1,wK, separated by commas), "
            "got none; --method plain is the model without a filter"
        )
    try:
        _try(method, options, _small_model())
    except ValueError as error:
        # the filter's name of an option may differ from that of the command line
        raise ValueError(f"method {name} cannot take {given}: {error}") from error


def check_fit(name: str, options: MethodConfig, model: nn.Module, what: str) -> None:
    """Raise ValueError if a method cannot be applied to a model, which this changes.

    Args:
        model: may be on the device ``meta``.
        what: the name of the model in the error.
    """
    try:
        _try(find_method(name), options, model)
    except ValueError as error:
        # the first two layers show the reason; one line per layer would hide it
        first, *layers = str(error).splitlines()
        reasons = "\n".join([first, *layers[:2], *(["  …"] if layers[2:] else [])])
        raise ValueError(f"method {name} cannot be applied to {what}: {reasons}") from error
    except RuntimeError:
        # the method reads weights, which a model on meta does not have: the run will show
        return


def _try(method: Method, options: MethodConfig, model: nn.Module) -> None:
    with warnings.catch_warnings():
        # the run itself repeats these warnings
        warnings.simplefilter("ignore")
        method.apply(model, options)


def _small_model() -> nn.Module:
    """A model that every method can be applied to, without memory or random numbers."""
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def added_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The trainable parameters that a method added to the model."""
    found = [p for f in gfsa.filters_of(model).values() for p in f.parameters()]
    known = {id(p) for p in found}
    return found + [p for p in baselines.parameters_of(model) if id(p) not in known]
