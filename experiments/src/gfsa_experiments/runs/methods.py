"""The methods that are compared: the change that each makes to a model before training."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

import gfsa
from gfsa.filters.gfsa import Power
from gfsa_experiments import baselines
from gfsa_experiments.baselines.methods import ResFormer
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
    apply: Callable[[nn.Module, MethodConfig], None]
    """Changes the model in place."""
    uses: tuple[str, ...] = ()
    """The options that it reads; setting another one is an error."""

    def used_options(self, options: MethodConfig) -> tuple[str, ...]:
        """The options that have an effect, given the values of the others."""
        if "learn" in self.uses and "wK" not in options.learn:
            # wK stays 0, so there is no term of order K
            return tuple(name for name in self.uses if name not in ("K", "power"))
        return self.uses


Apply = Callable[[nn.Module, MethodConfig], None]


def _plug(make: Any = None, exclusive: bool = False, **forced: Any) -> Apply:
    """Filters of ``make``, or GFSA; the options ``forced`` override those that are given.

    ``exclusive``: with a fixed share, unless the options want a learned one.
    """

    def apply(model: nn.Module, config: MethodConfig) -> None:
        config = replace(config, **forced)
        names = ("K", "learn", "w0", "power", "lr_multiplier")
        of_gfsa = {name: getattr(config, name) for name in names}

        def build(heads: int) -> gfsa.GraphFilter:
            built = gfsa.GFSA(heads, **of_gfsa) if make is None else make(heads)
            if config.share == "none" and not exclusive:
                return built
            learned = config.share == "learned"
            return built.exclude(0.0 if learned else 1.0, learned)

        gfsa.plug(model, filter=build, layers=config.layers, depth=config.first_values)

    return apply


# A·V itself, without learned coefficients, for terms beside it
_ATTENTION: dict[str, Any] = {"K": None, "learn": ()}
_EXCLUSIVE = _plug(exclusive=True, **_ATTENTION)


def _baseline(name: str, strength: str = "") -> Apply:
    def apply(model: nn.Module, config: MethodConfig) -> None:
        given: dict[str, Any] = {} if config.strength is None else {strength: config.strength}
        if name == "contranorm":
            given["form"] = config.form
        baselines.apply(model, name, layers=config.layers, **given)

    return apply


_LEARNED = ("layers", "filter_lr", "lr_multiplier", "share", "first_values")
_PUBLISHED = ("K", "w0", "power", *_LEARNED)
_OF_EVEN = ("learn", *(name for name in _PUBLISHED if name != "layers"))
_SCALES, _STRENGTH = ("layers", "filter_lr"), ("strength", "layers")
_TERMS = ("w0", *_LEARNED)
METHODS = {
    method.name: method
    for method in (
        Method("plain", "the model as it is", lambda model, config: None),
        Method("gfsa", "w0·I + w1·A + wK·A^K", _plug(), ("learn", *_PUBLISHED)),
        Method("gfsa-even", "the same in every second layer", _plug(layers="even"), _OF_EVEN),
        Method("gfsa-published", "wK alone is learned", _plug(learn=("wK",)), _PUBLISHED),
        Method("degree1", "w0·I + w1·A", _plug(K=None, learn=("w0", "w1")), _TERMS),
        Method("exclusive", "A·v without the part along the token's own v", _EXCLUSIVE, _TERMS),
        Method(
            "depth",
            "A·(v + r·v⁰), v⁰ the first layer's values",
            _plug(**_ATTENTION, first_values=True),
            _TERMS,
        ),
        Method("fixed-identity", "A − 0.4·I", _plug(**_ATTENTION, w0=-0.4), ("layers",)),
        Method("twicing", "2A − A²", _plug(gfsa.Twicing), ("layers",)),
        Method("resformer", "A·(v + v⁰)/2", _plug(ResFormer, first_values=True), ("layers",)),
        Method(
            "contranorm",
            "X − s·softmax(X·Xᵀ)·X after attention",
            _baseline("contranorm", "scale"),
            ("strength", "form", "layers"),
        ),
        Method("neutreno", "A·V + α(V⁰ − V)", _baseline("neutreno", "alpha"), _STRENGTH),
        Method("attnscale", "M + (1+λ)(A − M), M the mean", _baseline("attnscale"), _SCALES),
        Method("featscale", "y + λ1·mean(y) + λ2·(y − mean(y))", _baseline("featscale"), _SCALES),
        Method("layerscale", "γ ⊙ branch", _baseline("layerscale"), _SCALES),
    )
}


def find_method(name: str) -> Method:
    if name not in METHODS:
        raise ValueError(f"there is no method {name!r}; there are {', '.join(METHODS)}")
    return METHODS[name]


def changed_options(method: Method, config: MethodConfig) -> dict[str, Any]:
    """The options that differ from their defaults; the method must read all of them."""
    check_bounds(config)
    defaults = vars(MethodConfig())
    changed = {name: value for name, value in vars(config).items() if value != defaults[name]}
    for name in changed:
        if name not in method.uses:
            known = ", ".join(method.uses) or "none"
            raise ValueError(f"method {method.name} has no option {name!r}; its options: {known}")
    return changed


def check_options(name: str, options: MethodConfig, model: nn.Module | None, what: str) -> None:
    """Raise ValueError for options that the method does not accept, or not for ``model``.

    ``model`` may be on the device ``meta``, and is changed; None: any model. ``what`` is its name.
    """
    method = find_method(name)
    given = as_text(changed_options(method, options))
    if not options.learn:
        raise ValueError(
            "learn lists the coefficients that a filter learns (w0,w1,wK, separated by commas), "
            "got none; --method plain is the model without a filter"
        )
    try:
        # a model on meta lacks weights that some methods read: the run will show
        with warnings.catch_warnings(), contextlib.suppress(RuntimeError):
            # the run itself repeats these warnings
            warnings.simplefilter("ignore")
            method.apply(_small_model() if model is None else model, options)
    except ValueError as error:
        # the first two layers show the reason; one line per layer would hide it
        first, *layers = str(error).splitlines()
        reasons = "\n".join([first, *layers[:2], *(["  …"] if layers[2:] else [])])
        said = f"{name} {given}".strip()
        raise ValueError(f"method {said} cannot be applied to {what}: {reasons}") from error


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
