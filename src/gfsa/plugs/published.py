"""The published code: its checkpoints become filters, its settings are a preset of plug.

It learns one λ per head, called ``lamb`` (images, code), ``w_K`` (language, graphs) or ``beta``
(speech). K is hard-coded where the parameter is ``lamb``, and an option elsewhere.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gfsa.filters import GFSA, GraphFilter
from gfsa.operators.call import DropoutPlace
from gfsa.plugs.distributed import refuse_distributed
from gfsa.plugs.install import install
from gfsa.plugs.saving.identity import canonical_name, layer_named, numbers_in, pattern_of, some_of
from gfsa.plugs.sites import (
    PlugReport,
    Site,
    check_model,
    listed_reasons,
    plugged_sites,
    report_of,
    sites,
)
from gfsa.plugs.transaction import all_or_nothing

# what the published code calls the learned number of a head, and where its attention dropout acts
_PARAMETERS: dict[str, DropoutPlace] = {"lamb": "filter", "w_K": "attention", "beta": "filter"}

# backbone → the published code's K by default, and where its attention dropout acts
_PAPER: dict[str, tuple[int, DropoutPlace]] = {
    **dict.fromkeys(("bert", "albert", "roberta", "gpt2"), (3, "attention")),
    "graphormer": (2, "attention"),
    **dict.fromkeys(("vit", "deit", "cait"), (4, "filter")),
    **dict.fromkeys(("swin", "t5"), (3, "filter")),
    **dict.fromkeys(("speech", "bart", "plbart"), (2, "filter")),
}
# K is written into the files that call the parameter lamb; RoBERTa's is of the code task
_HARD_CODED = {name: K for name, (K, place) in _PAPER.items() if place == "filter"} | {"roberta": 4}
# classes of other libraries that are one of the paper's backbones
_BACKBONES = {
    "VisionTransformer": "deit",
    "Cait": "cait",
    "SwinTransformer": "swin",
    "Graphormer": "graphormer",
    "TransformerASR": "speech",
}


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
        by_order: match layers by their order instead of their names. Needs ``weights=False``.
        strict: raise if the checkpoint has a filter, not zero, where none can be: the published
            code filters cross-attention, too. With False such filters are left out, and the report
            names them.

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
    parameter, filters, rest = _read(state_dict)
    K, w0 = _settings(model, parameter, K, w0)
    matched = _matched(model, filters, by_order)
    planned: list[tuple[Site, GraphFilter]] = []
    left_out = {}
    for layer, site in matched.items():
        numbers = filters[layer].detach().double().cpu()
        if site.refusal is not None:
            if strict and bool(numbers.any()):
                raise ValueError(
                    f"the checkpoint has a filter for {layer}, where none can be: {site.refusal}. "
                    "strict=False leaves it out, which the published code does not"
                )
            left_out[site.name] = f"left out, although the checkpoint has one: {site.refusal}"
            continue
        heads = site.num_heads
        if numbers.shape != (heads,) or not bool(numbers.isfinite().all()):
            raise ValueError(
                f"{layer}.{parameter} must have one finite number for each of the {heads} heads of "
                f"{site.name}, got {numbers.tolist()!s:.80}; build the model that was trained"
            )
        with torch.device("cpu"), torch.inference_mode(False):
            filter = GFSA(heads, K=K, learn=("wK",), w0=w0, wK=numbers.tolist())
        filter.dropout_after = _PARAMETERS[parameter]
        planned.append((site, filter))
    if not planned:
        raise ValueError(
            f"no filter of the checkpoint can go into {type(model).__name__}:"
            + listed_reasons(left_out)
        )
    refuse_distributed(model, [site.module for site, _ in planned])
    own = [tensor for tensor in model.state_dict().values() if weights and not tensor.is_meta]
    with all_or_nothing(model, values=own):
        if weights:
            _load_weights(model, rest)
        install(model, planned)
    return report_of(planned, left_out)


def _settings(
    model: nn.Module, parameter: str, K: int | None, w0: float | None
) -> tuple[int, float]:
    """K and w0 of a checkpoint, if they are given or known."""
    config = getattr(model, "config", None)
    backbones = backbones_of(model)
    if K is None and parameter == "lamb":
        known = {_HARD_CODED[name] for name in backbones & _HARD_CODED.keys()}
        K = known.pop() if len(known) == 1 else None
    elif K is None:
        # the default of the published configs is 0, for a run without filters
        K = getattr(config, "K", None) or None
    if w0 is None:
        # an option of the language models alone
        is_option = parameter == "w_K" and "graphormer" not in backbones
        w0 = getattr(config, "w_0", None) if is_option else 0.0
    if K is None or w0 is None:
        raise ValueError(
            f"expected K and w0 of the training run, got K={K} and w0={w0} from the parameter "
            f"{parameter!r} and the config of {type(model).__name__} (config.K, config.w_0). Pass "
            "K= and w0= as in the command of the run (--K, --w_0)"
        )
    return K, float(w0)


def _matched(model: nn.Module, layers: Collection[str], by_order: bool) -> dict[str, Site]:
    """The site of each layer of the checkpoint: of the same name, or at the same place."""
    found = sites(model, unknown="trace")
    ordered = list(layers)
    if by_order:
        names = [name for name, site in found.items() if site.refusal is None]
        # a file may sort 10 before 2: each stack in the order of its numbers
        stacks = [pattern_of(layer) for layer in layers]
        ordered.sort(key=lambda x: (stacks.index(pattern_of(x)), list(map(int, numbers_in(x)))))
    else:
        own = {name: canonical_name(model, name) for name in found}
        wanted = [canonical_name(model, layer) for layer in layers]
        or_else = ", or match layers by their order (by_order=True, weights=False)"
        names = [layer_named(model, layer, own, "the checkpoint", or_else) for layer in wanted]
    if len(set(names)) != len(layers):
        raise ValueError(
            f"expected one attention layer of {type(model).__name__} for each of the {len(layers)} "
            f"filters in the checkpoint ({some_of(layers)}), got {len(set(names))} "
            f"({some_of(set(names))}): build the model that was trained, and pass its weights alone"
        )
    return {layer: found[name] for layer, name in zip(ordered, names, strict=True)}


# what training scripts put around the weights
_WRAPPERS = ("model", "state_dict", "model_state_dict", "module")
# buffers of old versions of the libraries, which the models compute for themselves today
_BUFFERS = re.compile(
    r"(^|\.)(position_ids|token_type_ids|relative_position_index|attn_mask|attn\.bias|"
    r"attn\.masked_bias|attention\.bias|attention\.masked_bias)$"
)


def _read(state_dict: Any) -> tuple[str, dict[str, Tensor], dict[str, Tensor]]:
    """The parameter of a checkpoint, layer → one number per head, and all other weights."""
    tensors = _unwrapped(state_dict)
    found = [key for key in tensors if key.endswith((".lamb", ".w_K"))] or [
        # an activation may call a number beta, and a normalisation its bias, beside a gamma
        key
        for key, x in tensors.items()
        if key.endswith(".beta")
        and (x.dim() and x.numel() == max(x.shape))
        and f"{key.rpartition('.')[0]}.gamma" not in tensors
    ]
    parameters = {key.rpartition(".")[2] for key in found}
    # some versions have axes of length 1 beside that of the heads
    shapes = {key: tuple(tensors[key].shape) for key in found}
    are_vectors = all(math.prod(shape) == max(shape, default=0) for shape in shapes.values())
    if len(parameters) != 1 or not are_vectors:
        kinds = {(key.rpartition(".")[2], shape): key for key, shape in shapes.items()}
        shown = some_of(f"{key} of shape {shape}" for (_, shape), key in kinds.items())
        raise ValueError(
            "expected one vector called lamb, w_K or beta, a number per head, for each layer of "
            f"the checkpoint, as in the published code; got {shown}. Remove what is not a filter; "
            "weights without filters go into the model by model.load_state_dict"
        )
    layers = {key.rpartition(".")[0]: tensors[key].flatten() for key in found}
    return parameters.pop(), layers, {k: x for k, x in tensors.items() if k not in shapes}


def _unwrapped(state_dict: Any) -> dict[str, Tensor]:
    """The weights by name, without what a training script or a wrapper puts around them."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            "state_dict must be a dict of tensors, as torch.load(file, weights_only=True) gives "
            f"it; got {type(state_dict).__name__}"
        )
    inside = [key for key in _WRAPPERS if isinstance(state_dict.get(key), Mapping)]
    if inside:
        return _unwrapped(state_dict[inside[0]])
    tensors = {str(key): value for key, value in state_dict.items() if isinstance(value, Tensor)}
    wrapped = all(key.startswith("module.") for key in tensors)
    return {key.removeprefix("module.") if wrapped else key: x for key, x in tensors.items()}


def _load_weights(model: nn.Module, rest: Mapping[str, Tensor]) -> None:
    """Load the other weights, which have to be all of the model's."""
    own = model.state_dict()
    without_memory = [key for key, value in own.items() if value.is_meta]
    if without_memory:
        raise ValueError(
            f"{some_of(without_memory)} of {type(model).__name__} are on the device meta and "
            "cannot hold weights: build the model on a device, or call model.to_empty(device=...)"
        )
    # timm knows how the names of its weights have changed
    module = sys.modules[type(model).__module__]
    update = getattr(module, "checkpoint_filter_fn", None)
    if module.__name__.startswith("timm.") and callable(update):
        rest = dict(update(dict(rest), model))
    advice = "Build the model that was trained, or load the weights yourself and pass weights=False"
    try:
        missing, extra = model.load_state_dict(rest, strict=False)
    except RuntimeError as error:
        raise ValueError(f"{' '.join(str(error).split()):.600}. {advice}") from error
    # buffers that the checkpoint has and the model does not, or the other way round
    missing, extra = ([k for k in keys if not _BUFFERS.search(k)] for keys in (missing, extra))
    # of tied weights the checkpoint may name one
    parameters = dict(model.named_parameters(remove_duplicate=False))
    loaded = {id(parameter) for name, parameter in parameters.items() if name in rest}
    missing = [name for name in missing if id(parameters.get(name)) not in loaded]
    if missing or extra:
        raise ValueError(
            f"the weights of the checkpoint are not those of {type(model).__name__}: missing "
            f"{some_of(missing)}; not expected {some_of(extra)}. {advice}"
        )


def preset_for(model: nn.Module, preset: str) -> dict[str, Any]:
    """The arguments of plug that ``preset`` sets for this model."""
    if preset != "paper":
        raise ValueError(f"preset must be 'paper' or None, got {preset!r}")
    backbones = backbones_of(model)
    settings = {_PAPER[backbone] for backbone in backbones}
    if len(settings) != 1:
        raise ValueError(
            f"the paper has no settings for {type(model).__name__}: expected one of "
            f"{', '.join(sorted(_PAPER))}, got {' and '.join(sorted(backbones)) or 'none'}. "
            "Pass K and learn instead, or plug the parts of the model one by one"
        )
    ((K, place),) = settings
    # it learns wK alone, from zero
    return {"K": K, "learn": ("wK",), "dropout_after": place}


def backbones_of(model: nn.Module) -> set[str]:
    """Which of the paper's backbones a model is, or contains."""
    found = set()
    for module in model.modules():
        model_type = getattr(getattr(module, "config", None), "model_type", None)
        names = [model_type, *(_BACKBONES.get(cls.__name__) for cls in type(module).__mro__)]
        found |= {name for name in names if name in _PAPER}
    return found
