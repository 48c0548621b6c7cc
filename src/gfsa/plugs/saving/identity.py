"""Names and fingerprints by which saved filters find their layers in a model again."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from gfsa.plugs.adapter import CHILD, plain_class
from gfsa.plugs.distributed import is_partitioned, shape_of

_WRAPPERS_ANYWHERE = (
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "base_layer",
)
_WRAPPERS_IN_FRONT = ("module.", "base_model.model.")


def canonical_name(model: nn.Module, name: str) -> str:
    """A layer's name without the prefixes of wrappers and of task models.

    transformers calls the same layer ``bert.encoder…`` in a classifier and ``encoder…`` in the
    bare backbone; wrappers (compiled, distributed, peft) add prefixes of their own.
    """
    name = without_wrappers(name)
    prefix = getattr(getattr(model, "module", model), "base_model_prefix", "")
    return name.removeprefix(f"{prefix}.") if prefix else name


def without_wrappers(name: str) -> str:
    """A layer's name without the prefixes of wrappers."""
    name = ".".join(part for part in name.split(".") if part not in _WRAPPERS_ANYWHERE)
    for wrapper in _WRAPPERS_IN_FRONT:
        name = name.removeprefix(wrapper)
    return name


def fingerprint_of(module: nn.Module) -> dict[str, str]:
    """A layer's class and a digest of its parameters' shapes, without those of its filter."""
    return fingerprint(kind_of_layer(module), shapes_of(module))


def fingerprint(kind: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """A class and a digest of the shapes of its parameters, as saved filters have them."""
    digest = hashlib.sha256(json.dumps(sorted(shapes.items())).encode()).hexdigest()[:16]
    return {"class": kind, "shapes": digest}


def kind_of_layer(module: nn.Module) -> str:
    """The name of a layer's class, plugged or not."""
    return plain_class(module).__name__


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of a module's parameters by their names, without filters and peft's adapters."""
    return {
        name.replace(".base_layer.", "."): _whole_shape(module, name, p)
        for name, p in _own_parameters(module)
    }


def _own_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """A module's parameters by their names, without filters and peft's adapters."""
    # peft keeps a layer that it adapts as base_layer, beside parameters of its own
    adapted = tuple(f"{name}." for name, m in module.named_modules() if hasattr(m, "base_layer"))
    for name, parameter in module.named_parameters():
        if CHILD not in name.split(".") and (
            ".base_layer." in name or not name.startswith(adapted)
        ):
            yield name, parameter


def weights_of(module: nn.Module) -> list[float] | None:
    """A few entries of a layer's matrices, by which its weights are recognised.

    None if they cannot be read: sharded, offloaded, quantised, or not finite.
    """
    named = {name.replace(".base_layer.", "."): p for name, p in _own_parameters(module)}
    matrices = [p.detach() for _, p in sorted(named.items()) if p.dim() > 1 and p.numel()]
    if any(is_partitioned(p) or p.is_meta or not p.is_floating_point() for p in named.values()):
        return None
    picked = [p.reshape(-1)[:: max(1, p.numel() // 4)][:4].float().cpu() for p in matrices[:4]]
    values = [value for part in picked for value in part.tolist()]
    if not all(map(math.isfinite, values)):
        return None
    return [float(f"{value:.6g}") for value in values]


def has_weights(module: nn.Module, saved: Any) -> bool:
    """Whether a layer has the weights that a file describes, as far as both are known.

    The tolerance is that of a cast to bfloat16 and back.
    """
    own = weights_of(module)
    if saved is None or own is None:
        return True
    return (
        isinstance(saved, list)
        and len(saved) == len(own)
        and all(
            isinstance(a, float) and math.isclose(a, b, rel_tol=0.02, abs_tol=1e-6)
            for a, b in zip(saved, own, strict=True)
        )
    )


def _whole_shape(module: nn.Module, name: str, parameter: nn.Parameter) -> tuple[int, ...]:
    """The shape of a parameter before it was quantised: weights of four bits are packed bytes."""
    if parameter.is_floating_point() or not name.endswith("weight"):
        return shape_of(parameter)
    owner = module.get_submodule(name.rpartition(".")[0])
    rows, columns = (getattr(owner, f"{side}_features", None) for side in ("out", "in"))
    if isinstance(rows, int) and isinstance(columns, int):
        return rows, columns
    return shape_of(parameter)


def depths_of(model: nn.Module, plugged: Iterable[str]) -> dict[str, int]:
    """How many layers each stack with a filter has, filtered or not: ``{"h.*.attn": 12}``."""
    patterns = {pattern_of(name) for name in plugged}
    # a block that is shared by all depths has one name per depth
    modules = model.named_modules(remove_duplicate=False)
    names = {canonical_name(model, name) for name, _ in modules}
    counts = Counter(stack_of(name) for name in names if pattern_of(name) in patterns)
    return dict(sorted(counts.items()))


def pattern_of(name: str) -> str:
    """A name with all its numbers replaced by ``*``."""
    return re.sub(r"\b\d+\b", "*", name)


def stack_of(name: str) -> str:
    """A name with its last number replaced: in a hierarchy every stage has a depth of its own."""
    return re.sub(r"\b\d+\b(?!.*\b\d+\b)", "*", name)


def check_depths(
    model: nn.Module, description: Mapping[str, Any], plugged: Iterable[str], source: str
) -> None:
    """Refuse a model of another depth, which may have all the layers that were saved."""
    found = depths_of(model, plugged)
    # files of older versions do not contain it
    saved = description.get("layers", found)
    if saved != found:
        raise ValueError(
            f"{source} belongs to another backbone: {type(model).__name__} has "
            f"{_counted(found, saved)}, the filters were saved from a "
            f"{description.get('model')!s:.80} "
            f"with {_counted(saved, found)}; load them into that backbone"
        )


def _counted(stacks: Any, others: Any) -> str:
    """The stacks whose depth differs from ``others``, with their depth."""
    if not (isinstance(stacks, dict) and isinstance(others, dict)):
        return repr(stacks)[:80]
    differing = [stack for stack in stacks if stacks[stack] != others.get(stack)]
    return some_of(
        f"{stacks[stack]!s:.20} layer{'' if stacks[stack] == 1 else 's'} {stack:.80}"
        for stack in differing
    )


def some_of(names: Any) -> str:
    names = sorted(f"{name:.120}" for name in names)
    shown = ", ".join(names[:3]) or "nothing"
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
