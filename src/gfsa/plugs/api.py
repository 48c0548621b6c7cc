"""Plug filters into a model that already exists, in place and reversibly."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import nn

from gfsa.filters import GFSA, GraphFilter
from gfsa.filters.gfsa import Power
from gfsa.operators.call import DropoutPlace, check_dropout_place
from gfsa.plugs.checks.trial import UNREACHED, try_forward
from gfsa.plugs.distributed import refuse_distributed
from gfsa.plugs.install import install, stacks_of, uninstall
from gfsa.plugs.registry import Unknown, example_inputs
from gfsa.plugs.sites import (
    NOT_SELECTED,
    ROOT,
    Layers,
    PlugReport,
    Site,
    accepting_sites,
    check_model,
    listed_reasons,
    parameters_in,
    plugged_sites,
    refuse_wrapped,
    report_of,
    select_layers,
    sites,
)
from gfsa.plugs.tracing.adapter import UNKNOWN
from gfsa.plugs.tracing.candidates import token_mixers
from gfsa.plugs.transaction import CHANGING

FilterFactory = Callable[[int], GraphFilter]
Plan = list[tuple[Site, GraphFilter]]


class _Unset:
    """The default of an argument that a preset may set."""

    def __repr__(self) -> str:
        return "default"


UNSET: Any = _Unset()


def plug(
    model: nn.Module,
    K: int | None = UNSET,
    layers: Layers = "all",
    filter: FilterFactory | None = None,
    learn: Sequence[str] = UNSET,
    w0: float | Sequence[float] = UNSET,
    w1: float | Sequence[float] = UNSET,
    wK: float | Sequence[float] = UNSET,
    power: Power = UNSET,
    lr_multiplier: float = UNSET,
    dropout_after: DropoutPlace = UNSET,
    preset: str | None = None,
    unknown: Unknown = "refuse",
    dry_run: bool = False,
    inputs: Any = None,
    depth: bool = False,
    degree: int | None = None,
    **others: Any,
) -> PlugReport:
    r"""Give the model's self-attention layers a graph filter each, in place.

    .. math:: A\,v \;\to\; (w_0 I + w_1 A + w_K (A + (K-1)(A^2 - A)))\,v

    The outputs do not change until a filter learns, or starts from other values than the
    defaults. The filters are child modules called ``gfsa``, which train, move and save with the
    model.

    Args:
        model: any model with attention that an adapter knows, compiled or in ``nn.DataParallel``
            too. Plug before DistributedDataParallel or fully_shard, which synchronise only the
            parameters that they find.
        K, learn, w0, w1, wK, power, lr_multiplier: as in :class:`gfsa.GFSA`, with its defaults
            (K = 3, all three learned, ordinary attention to begin with).
        degree: 1 is another way to write ``K=None``, one pass; 2 is the default.
        layers: ``"all"``, ``"even"``, ``"odd"``, ``"lower"`` or ``"upper"`` (half), numbers as in
            the report (counted from 1 over the self-attention layers that can be plugged), names,
            patterns such as ``"encoder.*"``, or a predicate ``(name, module) -> bool``.
        filter: another filter than GFSA, as a function of the number of heads: ``gfsa.Twicing`` or
            ``lambda heads: gfsa.Polynomial(heads, degree=4)``.
        dropout_after: where the layer's attention dropout acts: ``"attention"`` (default) drops
            entries of A once, before its powers; ``"filter"`` drops entries of H, which builds
            the n×n map while training.
        preset: ``"paper"`` takes the published settings for this backbone; arguments passed here
            override it.
        unknown: what to do with attention that no adapter knows: ``"refuse"`` skips it and
            reports the reason, ``"trace"`` follows its softmax to its product with v and verifies
            in each forward that this is self-attention. Classes of timm are traced in both cases
            if that works in a trial forward, on ``inputs`` or on images of the model's own size.
        dry_run: change nothing, only report.
        inputs: a batch (a tensor, a dict of keyword or a tuple of positional arguments) for a
            trial forward, in evaluation mode without gradients, which changes nothing. A layer is
            skipped, with the reason, if it raises, does not call its filter, or returns another
            output although the filter is ordinary attention; so is one of a registered adapter
            whose q and k are projected from different arguments. One that the batch does not reach
            keeps its filter, and the report says so. ``layers`` counts before the trial.
        depth: each layer but the first adds the first layer's values to its own before it
            attends, :math:`V + r_h V^0` with r learned from 0 (value residual, arXiv 2410.17897).

    Returns:
        A report of what was plugged and what was skipped, token mixers that are not attention
        (Mamba, Fourier transforms …) among them, with the reason.

    Raises:
        TypeError: if ``model`` is not an ``nn.Module``, ``filter`` is not a function that returns a
            :class:`gfsa.GraphFilter`, or an argument is unknown.
        ValueError: if nothing can be plugged, a layer is plugged or the model is distributed
            already, or an argument is invalid. Whatever is raised, the model is unchanged.

    Examples:
        >>> report = gfsa.plug(model, K=3)
        >>> print(report)
        plugged 2 layers, 24 learned numbers (0 skipped)
            1  layers.0.self_attn: 4 heads, adapter
            2  layers.1.self_attn: 4 heads, adapter
    """
    check_model(model)
    for name in others:
        raise TypeError(
            f"plug has no argument {name!r}; see help(gfsa.plug). Those of another filter go to "
            "filter=, as in lambda heads: gfsa.Polynomial(heads, degree=4), learning rates to "
            "gfsa.parameter_groups or gfsa.FilterRate"
        )
    arguments: dict[str, Any] = {
        "K": K,
        "learn": learn,
        "w0": w0,
        "w1": w1,
        "wK": wK,
        "power": power,
        "lr_multiplier": lr_multiplier,
        "dropout_after": dropout_after,
    }
    given = {name: value for name, value in arguments.items() if value is not UNSET}
    if degree is not None and ("K" in given or given.get("power") == "exact"):
        raise ValueError("degree and K (or power='exact') both set the degree; pass one of them")
    if preset is not None:
        from gfsa.plugs.published import preset_for

        given = {**preset_for(model, preset), **given}
    if degree is not None:
        if isinstance(degree, bool) or degree not in (1, 2):
            raise ValueError(
                f"degree must be 1 (c0·I + c1·A) or 2 (the default), got {degree!r:.40}; for "
                "others pass filter=lambda heads: gfsa.Polynomial(heads, degree=…)"
            )
        given["K"] = None if degree == 1 else given.get("K", 3)
    place: DropoutPlace = given.pop("dropout_after", "attention")
    if place != "attention":
        check_dropout_place(place)
    if unknown not in get_args(Unknown):
        raise ValueError(f"unknown must be one of {get_args(Unknown)}, got {unknown!r}")
    attempt = functools.partial(_tried, model, layers, _factory(filter, given), place)
    with CHANGING:
        found = sites(model, unknown)
        planned, report = _planned(model, found, attempt, inputs)
        if depth:
            _add_depth(planned)
            # filters without parameters have some now
            refuse_distributed(model, [site.module for site, _ in planned])
        _refuse_before_first(found, planned)
        report.parameters = parameters_in(planned)
        report.dry_run = dry_run
        if any(filter.starts_exclusive for _, filter in planned):
            report.note = (
                "the exclusive term has a share that is not 0: it changes the model from the first "
                "step on, which is for training from scratch"
            )
        if not dry_run:
            install(model, planned)
    if filter is None and not report.parameters and not {"w0", "w1", "wK"} & given.keys():
        warnings.warn(
            "the filters are ordinary attention and have nothing to learn; name what they learn, "
            'as in learn=("w0", "w1", "wK"), or give fixed values (w0=…)',
            stacklevel=2,
        )
    return report


def unplug(model: nn.Module) -> None:
    """Remove every filter: outputs, classes and state_dict keys are as before :func:`plug`.

    What the filters have learned is lost; :func:`gfsa.save` them first to keep it.

    Args:
        model: a plugged model; it is changed in place.

    Raises:
        ValueError: if the model has no filters, or another library (peft) wraps them.

    Examples:
        >>> report = gfsa.plug(model)
        >>> gfsa.unplug(model)
        >>> gfsa.filters_of(model)
        {}
    """
    with CHANGING:
        plugged = plugged_sites(model)
        if not plugged:
            raise ValueError(f"{type(model).__name__} has no filters to unplug")
        refuse_wrapped(plugged)
        uninstall(model, list(plugged.values()))


def plan_filters(
    model: nn.Module, found: Mapping[str, Site], layers: Layers, factory: FilterFactory
) -> tuple[Plan, PlugReport]:
    """The selected sites, each with a new filter, and the report; the model does not change."""
    accepting = accepting_sites(model, found)
    selected = select_layers({name: site.module for name, site in accepting.items()}, layers)
    planned: Plan = []
    taken = {id(site.filter): other for other, site in accepting.items() if site.is_plugged}
    for name in (name for name in accepting if name in selected):
        site = accepting[name]
        if site.is_plugged:
            raise ValueError(
                f"{name or ROOT} is plugged already; gfsa.unplug(model) first, or choose other "
                "layers"
            )
        # on the host, and trainable, wherever plug is called; attach moves it to the layer's device
        with torch.device("cpu"), torch.inference_mode(False):
            new_filter = factory(site.num_heads)
        expected = (
            f"filter({site.num_heads}) must return a gfsa.GraphFilter of {site.num_heads} heads, a "
            "new one in each call, as lambda heads: gfsa.GFSA(heads) does"
        )
        if not isinstance(new_filter, GraphFilter):
            raise TypeError(f"{expected}; got {type(new_filter).__name__}")
        if new_filter.num_heads != site.num_heads or id(new_filter) in taken:
            other = taken.get(id(new_filter))
            got = f"{new_filter.num_heads} heads" if other is None else f"the filter of {other}"
            raise ValueError(f"{expected}; got {got} for {name}")
        taken[id(new_filter)] = name
        planned.append((site, new_filter))
    skipped = {n: site.refusal or NOT_SELECTED for n, site in found.items() if n not in selected}
    report = report_of(planned, skipped, found)
    if report.parameters:
        refuse_distributed(model, [site.module for site, _ in planned])
    return planned, report


def _planned(
    model: nn.Module,
    found: Mapping[str, Site],
    attempt: Callable[..., tuple[Plan, PlugReport]],
    inputs: Any,
) -> tuple[Plan, PlugReport]:
    """The filters to install, and the report; modules of timm are traced if a trial succeeds."""
    refused = {
        name
        for name, site in found.items()
        if site.adapter is UNKNOWN and type(site.module).__module__.startswith("timm.")
    }
    traced = sites(model, "trace") if refused else {}
    tracing = {n: s for n, s in traced.items() if n in refused and s.refusal is None}
    batch = example_inputs(model) if tracing and inputs is None else inputs
    if tracing and batch is not None:
        try:
            return attempt({**found, **tracing}, batch, {n: found[n].refusal for n in tracing})
        except (ValueError, torch.OutOfMemoryError):
            if inputs is not None:
                raise
    return attempt(found, inputs)


def _tried(
    model: nn.Module,
    layers: Layers,
    factory: FilterFactory,
    place: DropoutPlace,
    found: Mapping[str, Site],
    inputs: Any,
    if_unreached: Mapping[str, str | None] | None = None,
) -> tuple[Plan, PlugReport]:
    """The filters of these sites; with inputs, of those alone that work in a trial forward.

    Args:
        if_unreached: the reason to skip a layer that the trial does not reach; others stay.
    """
    planned, report = plan_filters(model, found, layers, factory)
    report.skipped |= token_mixers(model, found)
    for _, new_filter in planned:
        new_filter.dropout_after = place
    if inputs is None:
        return planned, report
    refused, unreached = try_forward(model, planned, inputs)
    if planned and len(refused) == len(planned):
        raise ValueError(
            f"no filter works in {type(model).__name__} on these inputs:"
            + listed_reasons(refused)
            + "\ngfsa.register_adapter teaches gfsa an attention class of your own"
        )
    for name in unreached:
        report.how[name] += f", {UNREACHED}"
        if reason := (if_unreached or {}).get(name):
            refused[name] = reason
    for name, reason in refused.items():
        del report.plugged[name], report.how[name]
        report.skipped[name] = reason
    return [(site, filter) for site, filter in planned if site.name not in refused], report


def _add_depth(planned: Plan) -> None:
    """Give every filter but the first of each stack a depth term."""
    filters = {site.name: filter for site, filter in planned}
    for pattern, (_, *others) in stacks_of(filters).items():
        if not others:
            raise ValueError(
                f"depth=True adds the first layer's values in the layers above it, but {pattern} "
                "has one filtered layer: plug without it, or choose other layers with layers="
            )
        for name in others:
            filters[name].add_depth()


def _refuse_before_first(found: Mapping[str, Site], planned: Plan) -> None:
    """Raise for a filter before the layer whose values a depth term adds.

    A saved folder says which filters have the term: the first layer of their stack is V⁰.
    """
    plugged = {name: site.filter for name, site in found.items() if site.is_plugged}
    if not any(filter.has_depth for filter in plugged.values()):
        return
    new = {site.name for site, _ in planned}
    for names in stacks_of(name for name in found if name in new or name in plugged).values():
        has_depth = any(name in plugged and plugged[name].has_depth for name in names)
        if has_depth and names[0] in new:
            raise ValueError(
                f"{names[0]} comes before the layer whose values a depth term adds: gfsa.unplug "
                "the model, then plug all of these layers in one call"
            )


def _factory(filter: FilterFactory | None, given: dict[str, Any]) -> FilterFactory:
    if filter is None:
        return lambda heads: GFSA(heads, **given)
    if isinstance(filter, nn.Module) or not callable(filter):
        raise TypeError(
            "filter must be a function of the number of heads that returns a new filter, such as "
            f"gfsa.Twicing or lambda heads: gfsa.Polynomial(heads, degree=4); got {filter!r}"
        )
    if given:
        raise ValueError(
            f"{', '.join(given)} are arguments of GFSA, but filter= builds another filter; "
            "pass them to that filter instead"
        )
    return filter
