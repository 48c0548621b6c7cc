"""Filters on disk: a folder with the numbers (safetensors) and what they belong to (JSON)."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gfsa import filters as filter_kinds
from gfsa._version import __version__
from gfsa.filters import GraphFilter
from gfsa.filters.partial import PartialPolynomial
from gfsa.plugs.adapter import Adapter, find_adapter
from gfsa.plugs.call_check import watch_first_forward
from gfsa.plugs.plug import attach, finish, is_sharded, refuse_sharded, sockets_of

FORMAT = 1
EXTRA = "_extra_state"
TENSORS = "filters.safetensors"
DESCRIPTION = "filters.json"

# filters are a few numbers per head: nothing honest is larger
_MAX_TENSORS = 64 * 2**20
_MAX_DESCRIPTION = 4 * 2**20
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_WRAPPERS_ANYWHERE = (
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "base_layer",
)
_WRAPPERS_IN_FRONT = ("module.", "base_model.model.")
_KINDS = {
    kind.__name__: kind
    for kind in (
        filter_kinds.GFSA,
        filter_kinds.Polynomial,
        filter_kinds.Twicing,
        filter_kinds.Laplacian,
        filter_kinds.PageRank,
        PartialPolynomial,
    )
}


def save(model: nn.Module, path: str | Path) -> None:
    """Write the model's filters, and nothing else of it, into the folder ``path``.

    A few kB: ``filters.safetensors`` has the learned numbers, ``filters.json`` the kind of each
    filter, the layer it belongs to, and what that layer looked like.

    Of a model that is sharded over processes every process has to call this: the filters are
    gathered, and the first process writes.
    """
    description = describe(model)
    if not description["filters"]:
        raise ValueError(f"{type(model).__name__} has no filters to save; gfsa.plug(model) first")
    sockets = sockets_of(model)
    for name, socket in sockets.items():
        if type(socket.filter).__name__ not in _KINDS:
            raise ValueError(
                f"the filter of {name} is a {type(socket.filter).__name__}, which gfsa.load could "
                f"not build again: it knows {', '.join(_KINDS)}. Save its state_dict yourself, or "
                "plug filter.fold()"
            )
    from safetensors.torch import save_file

    tensors = {
        f"{canonical_name(model, name)}.{key}": _whole(value).detach().cpu().contiguous()
        for name, socket in sockets.items()
        for key, value in _numbers(socket.filter).items()
    }
    if any(is_sharded(socket) for socket in sockets.values()) and torch.distributed.get_rank() != 0:
        return
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / TENSORS, metadata={"format": "pt"})
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def load(model: nn.Module, path: str | Path) -> None:
    """Put the filters saved in the folder ``path`` into ``model``, plugging it where needed.

    Everything is checked first (layers, kinds, head counts, shapes, finite values); if anything
    does not fit, an error says what, and the model is as it was.
    """
    folder = Path(path)
    description = _read_description(folder / DESCRIPTION)
    restore(model, description, _read_tensors(folder / TENSORS), source=str(folder))


def describe(model: nn.Module) -> dict[str, Any]:
    """What filters a model has and where, as plain data."""
    return {
        "format": FORMAT,
        "gfsa": __version__,
        "model": type(model).__name__,
        "filters": {
            canonical_name(model, name): {
                **socket.filter.describe(),
                "backbone": _fingerprint(socket.module),
            }
            for name, socket in sockets_of(model).items()
        },
        "layers": _depths(model, [canonical_name(model, name) for name in sockets_of(model)]),
    }


def restore(
    model: nn.Module, description: Mapping[str, Any], tensors: Mapping[str, Tensor], source: str
) -> None:
    """Give ``model`` the filters of ``description`` with the numbers in ``tensors``."""
    plans = _plan(model, description, source)
    _check_tensors(plans, tensors, source)
    already = sockets_of(model)
    refuse_sharded(already, "load filters")
    if already and set(already) != {plan.name for plan in plans}:
        raise ValueError(
            f"the model is plugged in layers {_some(already)}, but {source} has filters for "
            f"{_some([plan.name for plan in plans])}; gfsa.unplug(model) first"
        )
    for plan in plans:
        if plan.name not in already:
            attach(plan.module, plan.adapter, plan.filter)
        # into the filter where it sits, in its precision
        target = already[plan.name].filter if plan.name in already else plan.filter
        numbers = {key: tensors[f"{plan.saved}.{key}"] for key in _numbers(target)}
        target.load_state_dict({**numbers, **_extra(plan.filter)})
    if not already:
        finish(model, {plan.adapter for plan in plans})
        watch_first_forward(model, {p.name: (p.module, p.filter) for p in plans})


def _numbers(filter: GraphFilter) -> dict[str, Tensor]:
    """A filter's state without its description, which is written down in JSON."""
    return {key: value for key, value in filter.state_dict().items() if key != EXTRA}


def _extra(filter: GraphFilter) -> dict[str, Tensor]:
    return {key: value for key, value in filter.state_dict().items() if key == EXTRA}


def canonical_name(model: nn.Module, name: str) -> str:
    """A layer's name without the prefix that only some of a backbone's heads have.

    transformers calls the same layer ``bert.encoder…`` in a classifier and ``encoder…`` in the
    bare backbone; wrappers (compiled, distributed, peft) put names of their own before it.
    """
    name = ".".join(part for part in name.split(".") if part not in _WRAPPERS_ANYWHERE)
    for wrapper in _WRAPPERS_IN_FRONT:
        name = name.removeprefix(wrapper)
    prefix = getattr(getattr(model, "module", model), "base_model_prefix", "")
    return name.removeprefix(f"{prefix}.") if prefix else name


@dataclass
class _Plan:
    """One saved filter and the layer it goes to."""

    name: str
    saved: str
    module: nn.Module
    adapter: Adapter
    filter: GraphFilter


def _plan(model: nn.Module, description: Mapping[str, Any], source: str) -> list[_Plan]:
    modules = {canonical_name(model, name): (name, m) for name, m in model.named_modules()}
    already = sockets_of(model)
    plans = []
    for saved, entry in _entries(description, source).items():
        if saved not in modules:
            raise ValueError(
                f"{source} has a filter for the layer {saved!r}, which {type(model).__name__} "
                f"does not have; it was saved from {description.get('model')!r}"
            )
        name, module = modules[saved]
        adapter = already[name].adapter if name in already else find_adapter(module, "trace")
        if adapter is None or (name not in already and adapter.refusal(name, module)):
            raise ValueError(f"{name} ({type(module).__name__}) cannot take the filter of {source}")
        found = _fingerprint(module)
        # a checkpoint of a whole model has the backbone itself, and says nothing of it here
        if found != entry.get("backbone", found):
            raise ValueError(
                f"{source} belongs to another backbone: {name} is {found}, the filter was saved "
                f"from {entry['backbone']}"
            )
        made = _rebuild(entry, name, source)
        if made.num_heads != adapter.num_heads(module):
            raise ValueError(
                f"{source} has a filter for {made.num_heads} heads, {name} has "
                f"{adapter.num_heads(module)}"
            )
        if name in already and type(already[name].filter).__name__ != entry["kind"]:
            raise ValueError(
                f"{name} is plugged with a {type(already[name].filter).__name__}, {source} has a "
                f"{entry['kind']}; gfsa.unplug(model) first"
            )
        if name in already and already[name].filter.config() != made.config():
            raise ValueError(
                f"{name} is plugged with {already[name].filter}, {source} has {made}; "
                "gfsa.unplug(model) first"
            )
        plans.append(_Plan(name, saved, module, adapter, made))
    _check_depths(model, description, [plan.saved for plan in plans], source)
    return plans


def _depths(model: nn.Module, plugged: Iterable[str]) -> dict[str, int]:
    """How many layers there are, filtered or not, where filtered ones are: ``h.*.attn`` 12."""
    places = {_place(name) for name in plugged}
    # a block that is used at every depth has a name at each
    modules = model.named_modules(remove_duplicate=False)
    names = {canonical_name(model, name) for name, _ in modules}
    counts = Counter(_siblings(name) for name in names if _place(name) in places)
    return dict(sorted(counts.items()))


def _place(name: str) -> str:
    """A name without its numbers."""
    return re.sub(r"\b\d+\b", "*", name)


def _siblings(name: str) -> str:
    """A name without its last number: in a hierarchy every stage has a depth of its own."""
    return re.sub(r"\b\d+\b(?!.*\b\d+\b)", "*", name)


def _check_depths(
    model: nn.Module, description: Mapping[str, Any], plugged: Iterable[str], source: str
) -> None:
    """A deeper model has every layer of a shallow one, and is another backbone all the same."""
    found = _depths(model, plugged)
    # files of older versions do not say
    saved = description.get("layers", found)
    if saved != found:
        raise ValueError(
            f"{source} belongs to another backbone: {type(model).__name__} has "
            f"{_counted(found, saved)}, the filters were saved from a {description.get('model')} "
            f"with {_counted(saved, found)}"
        )


def _counted(places: Any, others: Any) -> str:
    """Where two models differ, as the one has it."""
    if not (isinstance(places, dict) and isinstance(others, dict)):
        return repr(places)[:80]
    differing = [place for place in places if places[place] != others.get(place)]
    return _some(f"{places[place]} layers {place}" for place in differing)


def _entries(description: Mapping[str, Any], source: str) -> dict[str, dict[str, Any]]:
    if not isinstance(description, Mapping):
        raise ValueError(f"{source} describes no filters, got {type(description).__name__}")
    if description.get("format") != FORMAT:
        raise ValueError(
            f"{source} has format {description.get('format')!r}, this version of gfsa "
            f"({__version__}) reads format {FORMAT}; it was written by gfsa "
            f"{description.get('gfsa')!r}"
        )
    entries = description.get("filters")
    if not isinstance(entries, dict) or not entries:
        raise ValueError(f"{source} describes no filters")
    for name, entry in entries.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("kind"), str):
            raise ValueError(f"{source}: what it says of {name!r:.80} describes no filter")
    return entries


def _rebuild(entry: Mapping[str, Any], name: str, source: str) -> GraphFilter:
    kind, arguments = entry.get("kind"), entry.get("arguments")
    if kind not in _KINDS or not isinstance(arguments, dict):
        raise ValueError(
            f"{source}: the filter of {name} is a {kind!r}; known are {', '.join(_KINDS)}"
        )
    try:
        made: GraphFilter = _KINDS[kind](**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source}: the filter of {name} cannot be built: {error}") from error
    if entry.get("dropout_after") in ("attention", "filter"):
        made.dropout_after = entry["dropout_after"]
    return made


def _check_tensors(plans: list[_Plan], tensors: Mapping[str, Tensor], source: str) -> None:
    expected = {
        f"{plan.saved}.{key}": value
        for plan in plans
        for key, value in _numbers(plan.filter).items()
    }
    missing, extra = expected.keys() - tensors.keys(), tensors.keys() - expected.keys()
    if missing or extra:
        raise ValueError(
            f"{source} and its description disagree: missing {_some(missing)}, "
            f"not expected {_some(extra)}"
        )
    for name, wanted in expected.items():
        found = tensors[name]
        if found.shape != wanted.shape or found.dtype not in _DTYPES:
            raise ValueError(
                f"{source}: {name} should be floating point of shape {tuple(wanted.shape)}, "
                f"got {found.dtype} of shape {tuple(found.shape)}"
            )
        if not bool(torch.isfinite(found).all()):
            raise ValueError(f"{source}: {name} has values that are not finite")


def _fingerprint(module: nn.Module) -> dict[str, str]:
    """What a layer looked like without its filter: its class, and a digest of its shapes."""
    kind = module.__dict__.get("_gfsa_class", type(module))
    # peft keeps a layer that it adapts as base_layer, beside numbers of its own
    adapted = tuple(f"{name}." for name, m in module.named_modules() if hasattr(m, "base_layer"))
    shapes = sorted(
        (name.replace(".base_layer.", "."), tuple(p.shape))
        for name, p in module.named_parameters()
        if not name.startswith("gfsa.") and (".base_layer." in name or not name.startswith(adapted))
    )
    digest = hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16]
    return {"class": kind.__name__, "shapes": digest}


def _read_description(file: Path) -> dict[str, Any]:
    _check_file(file, _MAX_DESCRIPTION)
    try:
        description = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    if not isinstance(description, dict):
        raise ValueError(f"{file} is no description of filters")
    return description


def _read_tensors(file: Path) -> dict[str, Tensor]:
    _check_file(file, _MAX_TENSORS)
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged: {error}") from error


def _check_file(file: Path, most: int) -> None:
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist; gfsa.save(model, {str(file.parent)!r})")
    if file.stat().st_size > most:
        raise ValueError(
            f"{file} has {file.stat().st_size} bytes; filters are a few numbers per head, more "
            f"than {most} is refused"
        )


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def _some(names: Any) -> str:
    names = sorted(names)
    shown = ", ".join(names[:3]) or "nothing"
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
