"""By which names, shapes and weights saved filters find their layers in a model again."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from gfsa.plugs.adapter import CHILD, plain_class
from gfsa.plugs.distributed import is_partitioned

if TYPE_CHECKING:
    from gfsa.plugs.sites import Site

_WRAPPERS_ANYWHERE = (
    *("_orig_mod", "base_layer"),
    *("_fsdp_wrapped_module", "_checkpoint_wrapped_module"),
)
_WRAPPERS_IN_FRONT = ("module.", "base_model.model.")

# how many entries of a matrix are kept, and of how many matrices
_PICKED = 4


def canonical_name(model: nn.Module, name: str) -> str:
    """A layer's name without the prefixes of wrappers and of task models.

    transformers calls the same layer ``bert.encoder…`` in a classifier and ``encoder…`` in the
    bare backbone; wrappers (compiled, distributed, peft) add prefixes of their own.
    """
    name = ".".join(part for part in name.split(".") if part not in _WRAPPERS_ANYWHERE)
    for wrapper in _WRAPPERS_IN_FRONT:
        name = name.removeprefix(wrapper)
    prefix = getattr(getattr(model, "module", model), "base_model_prefix", "")
    return name.removeprefix(f"{prefix}.") if prefix else name


def layer_named(
    model: nn.Module, layer: str, names: Mapping[str, str], source: str, or_else: str = ""
) -> str:
    """The attention layer of ``model`` that a file calls ``layer``.

    ``names`` are the attention layers and their canonical names.
    """
    same = [name for name, own in names.items() if own == layer]
    if len(same) > 1:
        raise ValueError(
            f"{source} has a filter for {layer}, which {some_of(same)} can be; take the part of "
            "the model that it belongs to"
        )
    if not same:
        raise ValueError(
            f"{source} has a filter for the layer {layer!r:.80}, which {type(model).__name__} does "
            f"not have; its attention layers are {some_of(names)}. Build the model that "
            f"{source} is of{or_else}"
        )
    return same[0]


def fingerprint_of(module: nn.Module) -> dict[str, str]:
    """A layer's class and a digest of its parameters' shapes, without those of its filter."""
    shapes = {name: _whole_shape(module, name, p) for name, p in _own_parameters(module).items()}
    digest = hashlib.sha256(json.dumps(sorted(shapes.items())).encode()).hexdigest()[:16]
    return {"class": plain_class(module).__name__, "shapes": digest}


def _own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """A module's parameters by their names, without filters and peft's adapters."""
    # peft keeps a layer that it adapts as base_layer, beside parameters of its own
    adapted = tuple(f"{name}." for name, m in module.named_modules() if hasattr(m, "base_layer"))
    return {
        name.replace(".base_layer.", "."): parameter
        for name, parameter in module.named_parameters()
        if CHILD not in name.split(".") and (".base_layer." in name or not name.startswith(adapted))
    }


def _whole_shape(module: nn.Module, name: str, parameter: nn.Parameter) -> tuple[int, ...]:
    """The shape of a parameter before it was quantised: weights of four bits are packed bytes."""
    if not parameter.is_floating_point() and name.endswith("weight"):
        owner = module.get_submodule(name.rpartition(".")[0])
        rows, columns = (getattr(owner, f"{side}_features", None) for side in ("out", "in"))
        if isinstance(rows, int) and isinstance(columns, int):
            return rows, columns
    # ZeRO-3 leaves an empty tensor between forwards
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def weights_of(module: nn.Module) -> list[float] | None:
    """A few entries of a layer's first matrices, by which its weights are recognised.

    None if they cannot be read: sharded, offloaded, quantised, or not finite.
    """
    picked = _entries_of(_own_parameters(module))
    return None if picked is None else [*chain.from_iterable(picked[:_PICKED])]


def _entries_of(tensors: Mapping[str, Any]) -> list[list[float]] | None:
    """A few entries of each matrix, as :func:`weights_of` returns them."""
    for tensor in tensors.values():
        # torchao's quantised tensors call themselves floating-point, and cannot be reshaped
        is_plain = tensor.is_floating_point() and type(tensor.detach()) is Tensor
        if is_partitioned(tensor) or tensor.is_meta or not is_plain:
            return None
    picked = [
        p.detach().reshape(-1)[:: max(1, p.numel() // _PICKED)][:_PICKED].float().cpu().tolist()
        for _, p in sorted(tensors.items())
        if p.dim() > 1 and p.numel()
    ]
    if not all(map(math.isfinite, chain.from_iterable(picked))):
        return None
    return [[float(f"{value:.6g}") for value in entries] for entries in picked]


def has_weights(module: nn.Module, saved: Any) -> bool:
    """Whether a layer has the weights that a file describes, as far as both are known."""
    own = weights_of(module)
    return saved is None or own is None or _are_close(saved, own)


def _shares_weights(module: nn.Module, groups: list[Any]) -> bool:
    """Whether a layer certainly has one of the matrices of which these are entries."""
    return any(
        len(set(own)) == _PICKED and _are_close(group, own)
        for own in _entries_of(_own_parameters(module)) or ()
        for group in groups
    )


def _are_close(saved: Any, own: list[float]) -> bool:
    if not isinstance(saved, list) or len(saved) != len(own):
        return False
    # the tolerance is that of a cast to bfloat16 and back
    return all(
        isinstance(a, float) and math.isclose(a, b, rel_tol=0.02, abs_tol=1e-6)
        for a, b in zip(saved, own, strict=True)
    )


def renamed_layers(
    free: Iterable[Site],
    entries: Mapping[str, Mapping[str, Any]],
    matrices_of: Callable[[str], Mapping[str, Tensor]],
) -> dict[str, Site]:
    """The layers that another version of the model's library named, or built, in another way.

    A saved layer is the one ``free`` layer with the same numbers in its name and with some of the
    same weights. The file of a whole model has the weights themselves: ``matrices_of`` reads those
    of a layer. Returns the site of each saved layer for which it is certain.
    """
    chosen: dict[str, Site] = {}
    for saved, entry in entries.items():
        if "backbone" in entry:
            weights = entry.get("weights")
            flat = weights if isinstance(weights, list) else []
            groups = [flat[start : start + _PICKED] for start in range(0, len(flat), _PICKED)]
        else:
            groups = _entries_of(matrices_of(saved)) or []
        named = (site for site in free if numbers_in(site.name) == numbers_in(saved))
        may_be = [site for site in named if _shares_weights(site.module, groups)]
        if len(may_be) == 1:
            chosen[saved] = may_be[0]
    return chosen if len({site.name for site in chosen.values()}) == len(chosen) else {}


def numbers_in(name: str) -> list[str]:
    """The numbers in a layer's name, one for each stack that it is in."""
    return re.findall(r"\b\d+\b", name)


def depths_of(model: nn.Module, plugged: Iterable[str]) -> dict[str, int]:
    """How many layers each stack with a filter has, filtered or not: ``{"h.*.attn": 12}``."""
    patterns = {pattern_of(name) for name in plugged}
    # a block that is shared by all depths has one name per depth
    modules = model.named_modules(remove_duplicate=False)
    names = {canonical_name(model, name) for name, _ in modules}
    # in a hierarchy every stage has a depth of its own, so the last number alone is replaced
    stacks = (re.sub(r"\b\d+\b(?!.*\b\d+\b)", "*", n) for n in names if pattern_of(n) in patterns)
    return dict(sorted(Counter(stacks).items()))


def pattern_of(name: str) -> str:
    """A name with all its numbers replaced by ``*``."""
    return re.sub(r"\b\d+\b", "*", name)


def check_depths(
    model: nn.Module, description: Mapping[str, Any], plugged: Iterable[str], source: str
) -> None:
    """Refuse a model of another depth, which may have all the layers that were saved."""
    found = depths_of(model, plugged)
    # files of older versions do not contain it
    saved = description.get("layers", found)
    if saved != found:
        raise ValueError(
            f"{source} belongs to another backbone: {type(model).__name__} has {found!s:.200} "
            f"layers, the filters were saved from a {description.get('model')!s:.80} with "
            f"{saved!s:.200}; load them into that backbone"
        )


def some_of(names: Iterable[str]) -> str:
    """The first three names, and how many more there are."""
    names = sorted(f"{name:.120}" for name in names)
    shown = ", ".join(names[:3]) or "nothing"
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
