"""Apply a comparison method to a model that already exists, in place and reversibly."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gfsa.operators.operator import at_least_float32
from gfsa.plugs.api import plan_filters, plug
from gfsa.plugs.distributed import refuse_distributed
from gfsa.plugs.install import all_or_nothing, install, uninstall
from gfsa.plugs.sites import (
    NOT_SELECTED,
    Layers,
    check_model,
    plugged_sites,
    refuse_wrapped,
    report_text,
    select_layers,
    sites,
)
from gfsa_experiments.baselines.blocks import (
    FAMILIES,
    Anatomy,
    Place,
    Reader,
    anatomy_of,
    library_of,
    seen_by_tokens,
    width_of,
)
from gfsa_experiments.baselines.methods import (
    AttnScale,
    BaselineFilter,
    ContraNorm,
    FeatScale,
    LayerScale,
    NeuTRENO,
    Scope,
    TokenMethod,
    method_named,
)

CHILD = "gfsa_baseline"
"""The name under which a method's modules become a child of their block."""


@dataclass
class BaselineReport:
    """What :func:`apply` did."""

    method: str
    plugged: dict[str, str] = field(default_factory=dict)
    """Module name → where the method acts, in the model's order."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Module name → why the method does not act there."""
    parameters: int = 0
    """How many learned numbers were added."""

    def __str__(self) -> str:
        headline = f"{self.method} in {len(self.plugged)} layers, {self.parameters} learned numbers"
        return report_text(headline, self.plugged, self.skipped)


def apply(model: nn.Module, name: str, layers: Layers = "all", **options: Any) -> BaselineReport:
    """Apply a comparison method to the model's layers, in place.

    Args:
        model: a model with attention that gfsa knows; ``docs/reference/baselines.md`` lists what
            fits.
        name: one of :data:`METHODS`: ``"attnscale"``, ``"contranorm"``, ``"featscale"``,
            ``"layerscale"``, ``"neutreno"``.
        layers: which layers, as in :func:`gfsa.plug`.
        options: of the method; ``METHODS[name].options`` has them with their defaults.

    Returns:
        A report of where the method acts and what was skipped, with the reason.

    Raises:
        ValueError: if nothing fits, a method is applied already, or a name or an option is not
            known. The model is then unchanged.
    """
    check_model(model)
    method = method_named(name, options)
    if _is_applied(model):
        kind = type(model).__name__
        raise ValueError(f"{kind} has a method applied already; gfsa.baselines.remove(model) first")
    # a parameter that is created in inference mode could never be trained
    with all_or_nothing(model), torch.inference_mode(False):
        if method.kind is AttnScale:
            planned, plugged = plan_filters(
                model, sites(model), layers, lambda heads: AttnScale(heads, **options)
            )
            _refuse_windows(name, [site.module for site, _ in planned])
            # of transformers' models the operators know the masks, whatever a class calls them
            read = [
                (site, attn, Reader(site.module, site.module))
                for site, attn in planned
                if library_of(site.module) not in ("transformers", "diffusers")
            ]
            install(model, planned)
            for site, attn, reader in read:
                attn.scope = scope = Scope(site.name, reader)  # type: ignore[assignment]
                site.module.register_forward_pre_hook(scope.before, with_kwargs=True)
                site.module.register_forward_hook(scope.after)
            where = dict.fromkeys(plugged.plugged, "its attention map")
            report = BaselineReport(name, where, plugged.skipped, plugged.parameters)
        elif method.kind is NeuTRENO:
            report = _apply_neutreno(model, layers, options)
        else:
            report = _apply_to_blocks(model, name, method.kind, layers, options)
        for module in model.modules():
            if isinstance(module, nn.TransformerEncoder) and module.use_nested_tensor:
                # nested tensors have no padding mask to read; padded batches give the same outputs
                module.use_nested_tensor = False
                module.__dict__["_gfsa_nested"] = True
    return report


def remove(model: nn.Module) -> None:
    """Remove the applied method: outputs and state_dict keys are as before.

    What it has learned is lost. Filters of :func:`gfsa.plug` stay.

    Args:
        model: a model to which a method is applied; it is changed in place.

    Raises:
        TypeError: if ``model`` is no ``nn.Module``.
        ValueError: if no method is applied to it, or another library (peft) wraps its parts.
    """
    check_model(model)
    if not _is_applied(model):
        raise ValueError(f"{type(model).__name__} has no method to remove")
    plugged = {
        name: site
        for name, site in plugged_sites(model).items()
        if isinstance(site.filter, BaselineFilter)
    }
    refuse_wrapped(plugged)
    with all_or_nothing(model):
        uninstall(model, list(plugged.values()))
        for module in list(model.modules()):
            _remove_hooks(module)
            if isinstance(module._modules.get(CHILD), nn.ModuleDict):
                delattr(module, CHILD)
            if module.__dict__.pop("_gfsa_nested", False):
                module.use_nested_tensor = True  # type: ignore[assignment]


def parameters_of(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of the applied method, for an optimizer group with its own learning rate.

    Args:
        model: any model.

    Returns:
        The parameters; none if no method is applied, or the method learns nothing.
    """
    return [parameter for module in _applied(model) for parameter in module.parameters()]


def _applied(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, (BaselineFilter, TokenMethod))]


def _is_applied(model: nn.Module) -> bool:
    # gfsa.unplug removes the filters of a method, but not its hooks
    return bool(_applied(model)) or any(
        is_own_hook(hook)
        for module in model.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    )


def _apply_neutreno(model: nn.Module, layers: Layers, options: dict[str, Any]) -> BaselineReport:
    """NeuTRENO; the model's first layer is the source of v⁰ for the others."""

    def build(heads: int) -> NeuTRENO:
        return NeuTRENO(heads, **options)

    everywhere, _ = plan_filters(model, sites(model), "all", build)
    modules = {site.name: site.module for site, _ in everywhere}
    _refuse_windows("neutreno", modules.values())
    source = next(iter(modules))
    wanted = {source, *select_layers(modules, layers)}
    report = plug(model, filter=build, layers=lambda name, module: name in wanted, depth=True)
    where = {
        name: "its attention's output" if site.filter.has_depth else "the source of v⁰"
        for name, site in plugged_sites(model).items()
    }
    return BaselineReport("neutreno", where, report.skipped, report.parameters)


def _refuse_windows(name: str, modules: Iterable[nn.Module]) -> None:
    """Refuse Swin, whose windows differ from layer to layer, and whose masks hide with −100."""
    for found in modules:
        if hasattr(found, "window_size"):
            kind = type(found).__name__
            raise ValueError(f"{name} cannot be applied to a {kind}, which attends in windows")


def _apply_to_blocks(
    model: nn.Module, name: str, kind: Any, layers: Layers, options: dict[str, Any]
) -> BaselineReport:
    """A method of tokens, at its places in each of the selected blocks."""
    blocks: dict[str, tuple[nn.Module, Anatomy, dict[str, Place]]] = {}
    skipped: dict[str, str] = {}
    for path, block in model.named_modules():
        anatomy = anatomy_of(block)
        if anatomy is None:
            continue
        places = _places(kind, block, anatomy, options)
        if isinstance(places, str):
            skipped[path] = places
        else:
            blocks[path] = block, anatomy, places
    known = tuple(f"{path}." if path else "" for path in (*blocks, *skipped))
    for path in sites(model):
        if known and not path.startswith(known):
            skipped[path] = "it is in no block that is known"
    if not blocks:
        reasons = "".join(f"\n  {path}: {why}" for path, why in skipped.items())
        why = f":{reasons}" if reasons else f"; it can be applied to {FAMILIES}"
        raise ValueError(f"{name} cannot be applied to {type(model).__name__}{why}")
    report = BaselineReport(name, skipped=skipped)
    selected = select_layers({path: block for path, (block, _, _) in blocks.items()}, layers)
    for path, (block, anatomy, places) in blocks.items():
        if path not in selected:
            skipped[path] = NOT_SELECTED
            continue
        methods = nn.ModuleDict({key: _build(kind, block, anatomy, options) for key in places})
        report.plugged[path] = ", ".join(str(place) for place in places.values())
        report.parameters += sum(p.numel() for p in methods.parameters())
        _install_in_block(path, block, anatomy, places, methods)
    if report.parameters:
        refuse_distributed(model, [blocks[path][0] for path in report.plugged])
    return report


def _places(
    kind: Any, block: nn.Module, anatomy: Anatomy, options: dict[str, Any]
) -> dict[str, Place] | str:
    """Where a method acts in a block, or why it cannot."""
    if kind is LayerScale:
        owned = dict(block.named_parameters()).keys() & {*anatomy.own_scales}
        return "it has a LayerScale of its own" if owned else anatomy.branches
    if kind is FeatScale:
        return {"attention": anatomy.branches["attention"]}
    if options.get("form") == "vit":
        if not anatomy.norms:
            return anatomy.why_no_norm
        return {f"norm{i}": Place(norm, "input") for i, norm in enumerate(anatomy.norms, start=1)}
    if anatomy.after_attention is None:
        return anatomy.why_no_norm
    return {"norm": Place(anatomy.after_attention, "input")}


def _build(kind: Any, block: nn.Module, anatomy: Anatomy, options: dict[str, Any]) -> TokenMethod:
    sizes = () if kind is ContraNorm else (width_of(block, anatomy),)
    method: TokenMethod = kind(*sizes, **options)
    weight = next(block.parameters())
    return method.to(weight.device, at_least_float32(weight.dtype))


def _install_in_block(
    path: str, block: nn.Module, anatomy: Anatomy, places: dict[str, Place], methods: nn.ModuleDict
) -> None:
    methods.train(block.training)
    block.add_module(CHILD, methods)
    masked, reader = block.get_submodule(anatomy.masks_at), None
    if any(method.needs_visibility for method in methods.values()):
        reader = Reader(masked, block.get_submodule(anatomy.attention))
    scope = Scope(path or type(block).__name__, reader, len(places))
    masked.register_forward_pre_hook(scope.before, with_kwargs=True)
    # tokens are (N, B, D) by default in torch's layers
    swapped = isinstance(block, nn.TransformerEncoderLayer) and not block.self_attn.batch_first
    for key, place in places.items():
        method: Any = methods[key]
        module, at = block.get_submodule(place.module), AtPlace(scope, method, swapped)
        if place.side == "input":
            module.register_forward_pre_hook(at)
        else:
            module.register_forward_hook(at)
    block.register_forward_hook(scope.after)


@dataclass(eq=False)
class AtPlace:
    """A hook that passes the tokens at one place of a block, input or output, to a method."""

    scope: Scope
    method: TokenMethod
    sequence_first: bool

    def __call__(self, module: nn.Module, args: tuple[Any, ...], *outputs: Any) -> Any:
        given = outputs[0] if outputs else args
        if isinstance(given, Tensor):
            return self.change(given)
        return self.change(given[0]), *given[1:]

    def change(self, x: Tensor) -> Tensor:
        self.scope.now.visits += 1
        if not self.method.needs_visibility:
            return self.method(x, None)
        seen = seen_by_tokens(self.scope.visible(x))
        # to (B, N, D), whatever layout the block uses
        if x.dim() == 2:
            return self.method(x[None], seen)[0]
        if x.dim() == 4:
            # a grid (B, height, width, D)
            return self.method(x.flatten(1, 2), seen).view(x.shape)
        if self.sequence_first:
            return self.method(x.transpose(0, 1), seen).transpose(0, 1)
        return self.method(x, seen)


def is_own_hook(hook: Any) -> bool:
    return isinstance(hook, AtPlace) or isinstance(getattr(hook, "__self__", None), Scope)


def _remove_hooks(module: Any) -> None:
    """Remove the hooks of this package; a copied or unpickled model has no handles to them."""
    before = module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs
    others = module._forward_hooks_with_kwargs, module._forward_hooks_always_called
    for hooks, *about in (before, (module._forward_hooks, *others)):
        for key in [key for key, hook in hooks.items() if is_own_hook(hook)]:
            for table in (hooks, *about):
                table.pop(key, None)
