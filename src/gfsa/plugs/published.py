"""The published code: its checkpoints become filters, its settings are a preset of plug.

The published code writes the filter into copies of each framework, as

    H = w0·I + A + λ·(A + (K−1)(A² − A))

with one learned λ per head, called ``lamb`` (images, code), ``w_K`` (language, graphs) or ``beta``
(speech). K is hard-coded where the parameter is ``lamb``, and an option elsewhere. That is
``GFSA(K, learn=("wK",), w0=w0)``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Mapping
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
    parameter, filters, rest = read_checkpoint(state_dict)
    K, w0 = _settings(model, parameter, K, w0)
    found = sites(model, unknown="trace")
    matched = match_by_order(filters, found) if by_order else match_by_name(model, filters, found)
    planned: list[tuple[Site, GraphFilter]] = []
    left_out = {}
    for layer, site in matched.items():
        numbers = filters[layer].detach().double().cpu()
        if site.refusal is not None:
            if strict and bool(numbers.any()):
                raise ValueError(
                    f"the checkpoint has a filter for {layer}, where none can be: {site.refusal}. "
                    "strict=False leaves it out; the model then computes something else there than "
                    "the published code"
                )
            left_out[site.name] = f"left out, although the checkpoint has one: {site.refusal}"
            continue
        heads = site.num_heads
        if numbers.shape != (heads,) or not bool(numbers.isfinite().all()):
            raise ValueError(
                f"{layer}.{parameter} must have one finite number for each of the {heads} heads of "
                f"{site.name}, got {numbers.tolist()!s:.80}; build the model that was trained, or "
                "take an earlier checkpoint"
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
    if not isinstance(K, int) or isinstance(K, bool):
        raise ValueError(
            f"neither the parameter {parameter!r} of this checkpoint nor {type(model).__name__} "
            "tells its K. Pass K= as in the command of the training run"
        )
    if w0 is None:
        # an option of the language models alone
        is_option = parameter == "w_K" and "graphormer" not in backbones
        w0 = getattr(config, "w_0", None) if is_option else 0.0
    if w0 is None:
        raise ValueError(
            "w0 of this checkpoint is not known: the config of a published language model has it "
            "as w_0. Pass w0= as in the command of the training run (--w_0, by default 0)"
        )
    return K, float(w0)


def match_by_name(
    model: nn.Module, layers: Iterable[str], found: Mapping[str, Site]
) -> dict[str, Site]:
    """The site of each layer of the checkpoint: of the same name, or of one that ends alike."""
    names = {name: canonical_name(model, name) for name in found}
    or_else = ", or match layers by their order (by_order=True, weights=False)"
    matched: dict[str, str] = {}
    for layer in layers:
        wanted = canonical_name(model, layer)
        name = layer_named(model, wanted, names, "the checkpoint", or_else)
        if name in matched:
            raise ValueError(
                f"the checkpoint has 2 filters for {name}: {matched[name]} and {layer}; pass the "
                "weights of one model (without averaged copies beside them)"
            )
        matched[name] = layer
    return {layer: found[name] for name, layer in matched.items()}


def match_by_order(layers: Collection[str], found: Mapping[str, Site]) -> dict[str, Site]:
    """The sites that take a filter, in the model's order, for the layers in the checkpoint's."""
    accepting = [site for site in found.values() if site.refusal is None]
    if len(accepting) != len(layers):
        raise ValueError(
            f"the checkpoint has filters for {len(layers)} layers ({some_of(layers)}), the model "
            f"has {len(accepting)} ({some_of(site.name for site in accepting)}): they cannot be "
            "matched by order. Build the backbone that was trained"
        )
    # a file may sort 10 before 2: each stack in the order of its numbers
    stacks = [pattern_of(layer) for layer in layers]
    ordered = sorted(
        layers, key=lambda name: (stacks.index(pattern_of(name)), list(map(int, numbers_in(name))))
    )
    return dict(zip(ordered, accepting, strict=True))


# what training scripts put around the weights
_WRAPPERS = ("model", "state_dict", "model_state_dict", "module")
# buffers of old versions of the libraries, which the models compute for themselves today
_BUFFERS = re.compile(
    r"(^|\.)(position_ids|token_type_ids|relative_position_index|attn_mask|attn\.bias|"
    r"attn\.masked_bias|attention\.bias|attention\.masked_bias)$"
)


def read_checkpoint(state_dict: Any) -> tuple[str, dict[str, Tensor], dict[str, Tensor]]:
    """The parameter of a checkpoint, layer → one number per head, and all other weights."""
    tensors = _unwrapped(state_dict)
    for parameter in _PARAMETERS:
        numbers = {
            key: value
            for key, value in tensors.items()
            if key.endswith(f".{parameter}")
            # one number per head; some versions have axes of length 1 beside that of the heads
            and value.dim()
            and value.numel() == max(value.shape)
            # a normalisation may call its bias beta; it has a gamma beside it
            and f"{key.rpartition('.')[0]}.gamma" not in tensors
        }
        if numbers:
            break
    else:
        raise ValueError(
            "the checkpoint has no filters: none of its tensors is called lamb, w_K or beta, as in "
            f"the published code; it has {some_of(tensors)}. Load its weights with "
            "model.load_state_dict, then gfsa.plug(model)"
        )
    rest = {key: value for key, value in tensors.items() if key not in numbers}
    # beta is the name of a bias, too
    names = tuple({".lamb", ".w_K", f".{parameter}"} - {".beta"})
    others = {key: tuple(value.shape) for key, value in rest.items() if key.endswith(names)}
    if others:
        shown = some_of(f"{key} of shape {shape}" for key, shape in others.items())
        raise ValueError(
            f"expected one vector {parameter!r}, a number per head, for each layer of the "
            f"checkpoint, as in the published code; it also has {shown}. Remove what is not a "
            "filter of this model"
        )
    layers = {key.rpartition(".")[0]: value.flatten() for key, value in numbers.items()}
    return parameter, layers, rest


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
            "cannot hold weights: build the model on a device, or call "
            "model.to_empty(device=...) first"
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
    if not backbones:
        raise ValueError(
            f"the paper has no settings for {type(model).__name__}; it has settings for "
            f"{', '.join(sorted(_PAPER))}. Pass K and learn instead"
        )
    (K, place), *others = {_PAPER[backbone] for backbone in backbones}
    if others:
        raise ValueError(
            f"{type(model).__name__} contains {' and '.join(sorted(backbones))}, for which the "
            "paper has different settings; plug its parts one by one"
        )
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
