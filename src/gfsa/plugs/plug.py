"""Put filters into a model that already exists, in place and reversibly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import nn

from gfsa.filters import GFSA, GraphFilter
from gfsa.filters.gfsa import Power
from gfsa.operators.dense import DropoutPlace
from gfsa.plugs.adapter import CHILD, Adapter, Unknown, find_adapter
from gfsa.plugs.call_check import stop_watching, watch_first_forward
from gfsa.plugs.cross_attention import forget_tokens
from gfsa.plugs.layer_selection import Layers, select_layers
from gfsa.plugs.presets import preset_for

FilterFactory = Callable[[int], GraphFilter]


class _Unset:
    """Stands for an argument that was not given, so that a preset can tell."""

    def __repr__(self) -> str:
        return "default"


UNSET: Any = _Unset()


@dataclass
class PlugReport:
    """What :func:`plug` did, or would do."""

    plugged: dict[str, int] = field(default_factory=dict)
    """Module name → heads, in the model's order."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Module name → why it was left alone."""
    parameters: int = 0
    """How many learned numbers were added."""
    how: dict[str, str] = field(default_factory=dict)
    """Module name → how its filter is reached."""
    dry_run: bool = False

    def __str__(self) -> str:
        verb = "would plug" if self.dry_run else "plugged"
        lines = [
            f"{verb} {len(self.plugged)} layers, {self.parameters} learned numbers"
            f" ({len(self.skipped)} skipped)"
        ]
        lines += [
            f"  {number:>3}  {name}: {heads} heads, {self.how[name]}"
            for number, (name, heads) in enumerate(self.plugged.items(), start=1)
        ]
        lines += [f"    -  {name}: {reason}" for name, reason in self.skipped.items()]
        return "\n".join(lines)


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
) -> PlugReport:
    r"""Give the model's self-attention layers a graph filter each, in place.

    .. math:: A\,v \;\to\; (w_0 I + w_1 A + w_K (A + (K-1)(A^2 - A)))\,v

    The outputs do not change until something is learned (or told to differ). The filters are
    ordinary child modules called ``gfsa``: they train, move, save and print with the model.

    Args:
        model: any model with attention that an adapter knows; wrapped ones are fine.
        K, learn, w0, w1, wK, power, lr_multiplier: as in :class:`gfsa.GFSA`, with its defaults
            (K = 3, all three learned, ordinary attention to begin with).
        layers: ``"all"``, ``"even"``, ``"odd"``, layer numbers counted from 1 over the model's
            self-attention layers, or a predicate ``(name, module) -> bool``.
        filter: another filter, as a function of the number of heads, e.g. ``gfsa.Twicing`` or
            ``lambda heads: gfsa.Polynomial(heads, degree=4)``; the arguments of GFSA are then
            not used, and giving one is an error.
        dropout_after: where the layer's attention dropout acts: ``"attention"`` (default) drops
            entries of A once, before its powers; ``"filter"`` drops entries of H, which has to
            build the n×n map while training.
        preset: ``"paper"`` takes the published settings for this backbone; arguments given here
            go before it.
        unknown: what to do with attention that no adapter knows: ``"refuse"`` leaves it alone and
            says so, ``"trace"`` follows its softmax to its product with v and verifies itself on
            the first forward.
        dry_run: change nothing, only report.

    Returns:
        A report of what was plugged and what was skipped, with the reason.

    Raises:
        ValueError: if nothing can be plugged, a layer is plugged already, or an argument makes
            no sense. The model is then as it was.
    """
    check_model(model)
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
    if preset is not None:
        given = {**preset_for(model, preset), **given}
    place = given.pop("dropout_after", "attention")
    if place not in get_args(DropoutPlace):
        raise ValueError(f"dropout_after must be one of {get_args(DropoutPlace)}, got {place!r}")
    if unknown not in get_args(Unknown):
        raise ValueError(f"unknown must be one of {get_args(Unknown)}, got {unknown!r}")
    factory = _factory(filter, given)
    report = PlugReport(dry_run=dry_run)
    candidates = _candidates(model, report, unknown)
    chosen = select_layers({name: module for name, (module, _) in candidates.items()}, layers)
    planned: dict[str, tuple[nn.Module, Adapter, GraphFilter]] = {}
    for name, (module, adapter) in candidates.items():
        if name not in chosen:
            report.skipped[name] = "not among the chosen layers"
            continue
        if hasattr(module, CHILD):
            raise ValueError(
                f"{name} is plugged already; gfsa.unplug(model) first, or choose other layers"
            )
        made = _build(factory, adapter.num_heads(module), name)
        made.dropout_after = place
        planned[name] = (module, adapter, made)
        report.plugged[name] = made.num_heads
        report.how[name] = adapter.how
        report.parameters += sum(p.numel() for p in made.parameters())
    if not planned:
        reasons = "".join(f"\n  {name}: {why}" for name, why in report.skipped.items())
        raise ValueError(
            f"found no self-attention in {type(model).__name__} that a filter can be plugged into"
            + (f"; what was found cannot take one:{reasons}" if reasons else "")
            + "\ngfsa.register_adapter teaches gfsa an attention class of your own"
        )
    if not dry_run:
        for module, adapter, made in planned.values():
            attach(module, adapter, made)
        finish(model, {adapter for _, adapter, _ in planned.values()})
        watch_first_forward(model, {name: (m, made) for name, (m, _, made) in planned.items()})
    return report


def unplug(model: nn.Module) -> None:
    """Take every filter out again: outputs, classes and state_dict keys are as before plug.

    What the filters have learned is lost; :func:`gfsa.save` them first to keep it.
    """
    sockets = sockets_of(model)
    if not sockets:
        raise ValueError(f"{type(model).__name__} has no filters to unplug")
    refuse_wrapped(sockets)
    for socket in sockets.values():
        detach(socket)
    finish(model, {socket.adapter for socket in sockets.values()})


def filters_of(model: nn.Module) -> dict[str, GraphFilter]:
    """The model's filters by the name of their attention module, in the model's order."""
    return {name: socket.filter for name, socket in sockets_of(model).items()}


def parameter_groups(
    model: nn.Module,
    lr: float,
    filter_lr: float | None = None,
    weight_decay: float = 0.0,
) -> list[dict[str, Any]]:
    """Optimiser groups: the filters with a learning rate of their own and no weight decay.

    .. code-block:: python

        optimizer = AdamW(gfsa.parameter_groups(model, lr=2e-5, filter_lr=1e-2))

    A few numbers per head have far to go in a short fine-tuning run; at the model's usual
    learning rate they hardly move. Parameters that are frozen are left out.

    Args:
        model: a plugged model.
        lr: for everything else.
        filter_lr: for the filters; default: as ``lr``.
        weight_decay: for weights of two dimensions and more; biases, norms and filters get none.
    """
    filters = filters_of(model)
    if not filters:
        raise ValueError(f"{type(model).__name__} has no filters; gfsa.plug(model) first")
    theirs = [p for f in filters.values() for p in f.parameters() if p.requires_grad]
    if filter_lr is not None and not theirs:
        raise ValueError(
            f"filter_lr={filter_lr} has nothing to act on: every filter is frozen (peft freezes "
            "them unless modules_to_save=['gfsa']), or of a kind that learns nothing"
        )
    of_filters = {id(p) for p in theirs}
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in of_filters]
    groups = [
        {"name": "weights", "params": [p for p in rest if p.dim() > 1], "lr": lr}
        | {"weight_decay": weight_decay},
        {"name": "biases", "params": [p for p in rest if p.dim() <= 1], "lr": lr}
        | {"weight_decay": 0.0},
        {"name": "filters", "params": theirs, "lr": lr if filter_lr is None else filter_lr}
        | {"weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


@dataclass
class Socket:
    """One plugged attention module."""

    module: nn.Module
    adapter: Adapter
    filter: GraphFilter
    wrapper: nn.Module
    """What sits at ``module.gfsa``: the filter, or what another library wrapped around it."""


def sockets_of(model: nn.Module) -> dict[str, Socket]:
    """Every plugged attention module of the model, by name, in the model's order."""
    check_model(model)
    sockets = {}
    for name, module in model.named_modules():
        adapter = module.__dict__.get("_gfsa_adapter")
        if adapter is not None:
            wrapper = getattr(module, CHILD)
            sockets[name] = Socket(module, adapter, _unwrap(name, wrapper), wrapper)
    return sockets


def check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a model (an nn.Module), got {type(model).__name__}")


def attach(module: nn.Module, adapter: Adapter, made: GraphFilter) -> None:
    """Make ``made`` the filter of ``module``, on its device."""
    double = any(p.dtype == torch.float64 for p in module.parameters())
    # a few numbers stay in float32 in a half-precision model, where small steps would be lost
    made = made.to(device=_device_of(module), dtype=torch.float64 if double else None)
    made.train(module.training)
    module.add_module(CHILD, made)
    module.__dict__["_gfsa_adapter"] = adapter
    adapter.install(module)


def _device_of(module: nn.Module) -> torch.device | None:
    """Where the module computes: accelerate may keep its weights elsewhere (offloaded)."""
    computes = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    if computes is not None:
        return torch.device(computes)
    held = next((x for x in (*module.parameters(), *module.buffers())), None)
    return None if held is None else held.device


def refuse_wrapped(sockets: Mapping[str, Socket]) -> None:
    """Filters that another library holds on to can be neither taken out nor exchanged."""
    for name, socket in sockets.items():
        if socket.wrapper is not socket.filter:
            raise ValueError(
                f"the filter of {name} is wrapped in {type(socket.wrapper).__name__}; "
                "unwrap the model first (for peft: model.merge_and_unload())"
            )


def is_sharded(socket: Socket) -> bool:
    """Whether a filter's numbers are spread over processes (a DTensor)."""
    return any(hasattr(parameter, "full_tensor") for parameter in socket.filter.parameters())


def refuse_sharded(sockets: Mapping[str, Socket], doing: str) -> None:
    """Some things are done to whole filters only."""
    for name, socket in sockets.items():
        if is_sharded(socket):
            raise ValueError(
                f"the filter of {name} is sharded over processes; {doing} before fully_shard or "
                "parallelize_module"
            )


def detach(socket: Socket) -> None:
    """Take the filter of one module out."""
    stop_watching(socket.filter)
    socket.adapter.remove(socket.module)
    delattr(socket.module, CHILD)
    del socket.module.__dict__["_gfsa_adapter"]
    forget_tokens(socket.module)


def _candidates(
    model: nn.Module, report: PlugReport, unknown: Unknown
) -> dict[str, tuple[nn.Module, Adapter]]:
    candidates = {}
    modules = dict(model.named_modules())
    for name, module in modules.items():
        adapter = module.__dict__.get("_gfsa_adapter") or find_adapter(module, unknown)
        if adapter is None:
            continue
        refusal = None
        if not hasattr(module, CHILD):
            refusal = adapter.refusal(name, module)
            refusal = refusal or adapter.refusal_inside(_owners(name, modules))
        if refusal is None:
            candidates[name] = (module, adapter)
        else:
            report.skipped[name] = refusal
    return candidates


def _owners(name: str, modules: dict[str, nn.Module]) -> list[tuple[nn.Module, str]]:
    owners = []
    while name:
        name, _, attribute = name.rpartition(".")
        owners.append((modules[name], attribute))
    return owners


def _factory(filter: FilterFactory | None, given: dict[str, Any]) -> FilterFactory:
    if filter is None:
        return lambda heads: GFSA(heads, **given)
    if isinstance(filter, nn.Module) or not callable(filter):
        raise TypeError(
            "filter must be a function of the number of heads that makes a new filter, such as "
            f"gfsa.Twicing or lambda heads: gfsa.Polynomial(heads, degree=4); got {filter!r}"
        )
    if given:
        raise ValueError(
            f"{', '.join(given)} belong to GFSA, but filter= makes another filter; "
            "give them to that filter instead"
        )
    return filter


def _build(factory: FilterFactory, heads: int, name: str) -> GraphFilter:
    made = factory(heads)
    if not isinstance(made, GraphFilter):
        raise TypeError(f"filter({heads}) must make a gfsa.GraphFilter, got {type(made).__name__}")
    if made.num_heads != heads:
        raise ValueError(
            f"{name} has {heads} heads, but filter({heads}) made a filter for {made.num_heads}"
        )
    return made


def _unwrap(name: str, wrapper: nn.Module) -> GraphFilter:
    if isinstance(wrapper, GraphFilter):
        return wrapper
    # peft's modules_to_save keeps the trained copy of the filter inside a wrapper
    inside = [m for m in _innermost_first(wrapper) if isinstance(m, GraphFilter)]
    if not inside:
        raise ValueError(f"what sits at {name}.{CHILD} is no filter: {type(wrapper).__name__}")
    return inside[0]


def _innermost_first(wrapper: nn.Module) -> Iterator[nn.Module]:
    active = getattr(wrapper, "active_adapter", None)
    copies = getattr(wrapper, "modules_to_save", None)
    if isinstance(active, str) and isinstance(copies, nn.ModuleDict) and active in copies:
        yield copies[active]
    yield from wrapper.modules()


def finish(model: nn.Module, adapters: set[Adapter]) -> None:
    """Tell the adapters that the filters of ``model`` have changed."""
    for adapter in adapters:
        adapter.mark(model)
