"""Checkpoints of the published code: its parameters become filters.

The published code writes the filter into copies of each framework, as

    H = w0·I + A + λ·(A + (K−1)(A² − A))

with one learned λ per head, called ``lamb`` (images, code), ``w_K`` (language, graphs) or ``beta``
(speech). K is hard-coded where the parameter is ``lamb``, and an option elsewhere. That is
``GFSA(K, learn=("wK",), w0=w0)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gfsa.filters import GFSA
from gfsa.operators.call import DropoutPlace
from gfsa.plugs.attach import install
from gfsa.plugs.parallel import refuse_distributed
from gfsa.plugs.presets import backbones_of
from gfsa.plugs.published_layers import match_by_name, match_by_order
from gfsa.plugs.published_weights import read_checkpoint, weights_for
from gfsa.plugs.report import PlugReport
from gfsa.plugs.rollback import all_or_nothing
from gfsa.plugs.sites import Site, check_model, plugged_sites, sites

# where the attention dropout of that code acts
_DROPOUT: dict[str, DropoutPlace] = {"lamb": "filter", "beta": "filter", "w_K": "attention"}
# K as it is written into the files that call the parameter lamb
_HARD_CODED = {
    "vit": 4,
    "deit": 4,
    "cait": 4,
    "swin": 3,
    "roberta": 4,
    "t5": 3,
    "bart": 2,
    "plbart": 2,
}
# of the backbones whose parameter is w_K, these have no option w_0
_WITHOUT_W0 = {"graphormer"}


@dataclass(frozen=True)
class _Settings:
    """What the filters of one checkpoint have in common."""

    parameter: str
    K: int
    w0: float


def convert(
    model: nn.Module,
    state_dict: Mapping[str, Any],
    *,
    K: int | None = None,
    w0: float | None = None,
    weights: bool = True,
    by_order: bool = False,
    strict: bool = True,
) -> PlugReport:
    r"""Give ``model`` the weights and the filters of a checkpoint of the published GFSA code.

    .. math:: H = w_0 I + A + λ\,(A + (K-1)(A^2 - A))
              \quad\to\quad \text{GFSA}(K,\, \text{learn}=(w_K),\, w_0),\; w_K = λ

    .. code-block:: python

        model = timm.create_model("deit_small_patch16_224")
        checkpoint = torch.load("gfsa_small_12.pth", weights_only=True, map_location="cpu")
        gfsa.convert(model, checkpoint)

    Args:
        model: the backbone, unplugged: of timm, transformers, SpeechBrain or your own.
        state_dict: the checkpoint: weights by name, or a dict that has them under ``"model"`` or
            ``"state_dict"``.
        K: the order of the high-order term. Where the parameter is ``lamb`` the published code has
            it hard-coded, and it is known; elsewhere it is an option of the training run, read from
            ``model.config.K`` if the model was built with the saved config.
        w0: the coefficient of I, an option of the language models; read from ``model.config.w_0``.
        weights: load the other weights into the model, too. With False, only filters are
            converted, for a model whose weights are loaded already.
        by_order: match layers by their order instead of their names, for a backbone that names
            its layers differently. Needs ``weights=False``.
        strict: raise if the checkpoint has a filter, not zero, where none can be (the published
            code filters the cross-attention of encoder-decoder models after padding its map with
            zeros). With False such filters are left out, and the report names them.

    Returns:
        A report as that of :func:`gfsa.plug`.

    Raises:
        ValueError: if the checkpoint does not fit the model. The model is then unchanged.
    """
    check_model(model)
    if by_order and weights:
        raise ValueError(
            "by_order=True is for a backbone with other names, into which the weights of the "
            "checkpoint cannot be loaded: pass weights=False and load them yourself"
        )
    if plugged_sites(model):
        raise ValueError(f"{type(model).__name__} is plugged already; gfsa.unplug(model) first")
    checkpoint = read_checkpoint(state_dict)
    found = sites(model, unknown="trace")
    settings = _settings(model, checkpoint.parameter, K, w0)
    if by_order:
        matched = match_by_order(checkpoint.filters, found)
    else:
        matched = match_by_name(model, checkpoint.filters, found)
    planned, report = _plan(model, matched, checkpoint.filters, settings, strict)
    refuse_distributed(model, [site.module for site, _ in planned])
    fitting = weights_for(model, checkpoint.weights) if weights else {}
    with all_or_nothing(model):
        install(model, planned)
        # last, because nothing after it can fail: names and shapes are checked
        model.load_state_dict(fitting, strict=False)
    return report


def _settings(model: nn.Module, parameter: str, K: int | None, w0: float | None) -> _Settings:
    config = getattr(model, "config", None)
    backbones = backbones_of(model)
    if K is None and parameter == "lamb":
        known = {_HARD_CODED[backbone] for backbone in backbones if backbone in _HARD_CODED}
        if len(known) == 1:
            (K,) = known
    elif K is None:
        # the default of the published configs is 0, for a run without filters
        K = getattr(config, "K", None) or None
    if not isinstance(K, int) or isinstance(K, bool):
        raise ValueError(
            f"K of this checkpoint is not known: its parameter {parameter!r} does not tell, and "
            f"neither does {type(model).__name__}. Pass K= as in the command of the training run"
        )
    if w0 is None and (parameter != "w_K" or backbones & _WITHOUT_W0):
        w0 = 0.0
    elif w0 is None:
        w0 = getattr(config, "w_0", None)
    if w0 is None:
        raise ValueError(
            "w0 of this checkpoint is not known: it is an option (--w_0) of the published language "
            "models, which the saved config has as w_0. Pass w0= as in the command of the training "
            "run (its default there is 0)"
        )
    return _Settings(parameter, K, float(w0))


def _plan(
    model: nn.Module,
    matched: Mapping[str, Site],
    layers: Mapping[str, Tensor],
    settings: _Settings,
    strict: bool,
) -> tuple[list[tuple[Site, GFSA]], PlugReport]:
    """Build the filters, and the report of them, without changing the model."""
    report = PlugReport()
    planned = []
    for layer, site in matched.items():
        numbers = layers[layer].detach().double().cpu()
        if not bool(numbers.isfinite().all()):
            raise ValueError(
                f"{layer}.{settings.parameter} has values that are not finite; take an earlier "
                "checkpoint of the run"
            )
        if site.refusal is not None:
            if strict and bool(numbers.any()):
                raise ValueError(
                    f"the checkpoint has a filter for {layer}, where none can be: {site.refusal}. "
                    "strict=False leaves it out; the model then computes something else there than "
                    "the published code"
                )
            report.skipped[site.name] = f"left out, although the checkpoint has one: {site.refusal}"
            continue
        heads = site.num_heads
        if numbers.shape != (heads,):
            raise ValueError(
                f"{layer}.{settings.parameter} has {numbers.numel()} numbers, {site.name} has "
                f"{heads} heads, expected one number per head; build the model that was trained"
            )
        with torch.device("cpu"), torch.inference_mode(False):
            filter = GFSA(heads, K=settings.K, learn=("wK",), w0=settings.w0, wK=numbers.tolist())
        filter.dropout_after = _DROPOUT[settings.parameter]
        planned.append((site, filter))
        report.plugged[site.name] = heads
        report.how[site.name] = site.adapter.how
        report.parameters += heads
    if not planned:
        raise ValueError(
            f"no filter of the checkpoint can go into {type(model).__name__}: "
            + "; ".join(f"{name}: {why}" for name, why in report.skipped.items())
        )
    return planned, report
