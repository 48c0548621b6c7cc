"""Sites: a model's attention modules, each with its adapter and its filter, or the refusal.

Beside them, the report that lists them, and the selection of layers.
"""

from __future__ import annotations

import fnmatch
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch import nn

from gfsa.filters import GraphFilter
from gfsa.plugs.adapter import ADAPTER, CHILD, Adapter
from gfsa.plugs.distributed import is_partitioned
from gfsa.plugs.registry import Unknown, find_adapter


@dataclass(frozen=True, eq=False)
class Site:
    """An attention module of a model, with its filter, or with the reason why it has none."""

    name: str
    """The module's name in the model."""
    module: nn.Module
    adapter: Adapter
    child: nn.Module | None = None
    """``module.gfsa`` when the site was found: the filter, another library's wrapper around it,
    or None if the module is not plugged."""
    refusal: str | None = None
    """Why no filter can go here, or None if one can."""

    @property
    def is_plugged(self) -> bool:
        return self.child is not None

    @property
    def num_heads(self) -> int:
        """Query heads of the module; only a site without a refusal has them."""
        return self.adapter.num_heads(self.module)

    @property
    def filter(self) -> GraphFilter:
        """The filter of a plugged site."""
        if isinstance(self.child, GraphFilter):
            return self.child
        if self.child is None:
            raise ValueError(f"{self.name} has no filter; gfsa.plug(model) first")
        inside = [m for m in _active_copy_first(self.child) if isinstance(m, GraphFilter)]
        if not inside:
            raise ValueError(
                f"{self.name}.{CHILD} must be a gfsa.GraphFilter, got {type(self.child).__name__}"
            )
        return inside[0]


def sites(model: nn.Module, unknown: Unknown = "refuse") -> dict[str, Site]:
    """Every attention module of the model, by name, in the model's order.

    Args:
        model: any model; nothing in it changes.
        unknown: whether attention that no adapter knows is refused or traced, as in
            :func:`gfsa.plug`.

    Returns:
        Module name → :class:`Site`, those that cannot be plugged among them, with the reason.
    """
    check_model(model)
    modules = dict(model.named_modules())
    found = {}
    for name, module in modules.items():
        if isinstance(module, GraphFilter):
            # a filter has heads and may be named after attention, but is not a site
            continue
        adapter = module.__dict__.get(ADAPTER) or find_adapter(module, unknown)
        if adapter is None:
            continue
        child = getattr(module, CHILD, None)
        refusal = None
        if child is None:
            refusal = adapter.refusal(name, module)
            path = name.split(".") if name else []
            around = reversed(range(len(path)))
            owners = [(modules[".".join(path[:end])], path[end]) for end in around]
            refusal = refusal or adapter.refusal_inside(owners)
        found[name] = Site(name, module, adapter, child, refusal)
    return found


def plugged_sites(model: nn.Module) -> dict[str, Site]:
    """The sites of the model that have a filter, by name, in the model's order."""
    check_model(model)
    return {
        name: Site(name, module, module.__dict__[ADAPTER], getattr(module, CHILD))
        for name, module in model.named_modules()
        if ADAPTER in module.__dict__
    }


def filters_of(model: nn.Module) -> dict[str, GraphFilter]:
    """The model's filters by the name of their attention module, in the model's order."""
    return {name: site.filter for name, site in plugged_sites(model).items()}


def accepting_sites(model: nn.Module, found: Mapping[str, Site]) -> dict[str, Site]:
    """The sites without a refusal; raises a ValueError with all refusals if there are none."""
    accepting = {name: site for name, site in found.items() if site.refusal is None}
    if not accepting:
        reasons = listed_reasons({name: str(site.refusal) for name, site in found.items()})
        raise ValueError(
            f"found no self-attention in {type(model).__name__} that a filter can be plugged into"
            + (f"; the attention that was found is refused:{reasons}" if reasons else "")
            + "\ngfsa.register_adapter teaches gfsa an attention class of your own"
        )
    return accepting


def check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        hint = f". {IN_PLACE}" if isinstance(model, PlugReport) else ""
        raise TypeError(f"expected a model (an nn.Module), got {type(model).__name__}{hint}")


def is_sharded(site: Site) -> bool:
    """Whether the filter's parameters are distributed over processes."""
    return any(is_partitioned(parameter) for parameter in site.filter.parameters())


def refuse_wrapped(found: Mapping[str, Site]) -> None:
    """Raise if another library wraps a filter: it could be neither removed nor replaced."""
    for name, site in found.items():
        if site.child is not site.filter:
            raise ValueError(
                f"the filter of {name} is wrapped in {type(site.child).__name__}; "
                "unwrap the model first (for peft: model.merge_and_unload())"
            )


def refuse_sharded(found: Mapping[str, Site], action: str) -> None:
    """Raise if a filter is distributed over processes, where ``action`` needs all of it."""
    for name, site in found.items():
        if is_sharded(site):
            raise ValueError(
                f"the filter of {name} is sharded over processes; {action} before fully_shard, "
                "parallelize_module or deepspeed.initialize"
            )


def _active_copy_first(wrapper: nn.Module) -> Iterator[nn.Module]:
    """The modules inside a wrapper; of peft's modules_to_save first the one that runs."""
    active = getattr(wrapper, "active_adapter", None)
    copies = getattr(wrapper, "modules_to_save", None)
    original = getattr(wrapper, "original_module", None)
    if isinstance(original, nn.Module) and getattr(wrapper, "disable_adapters", False):
        yield original
    elif isinstance(active, str) and isinstance(copies, nn.ModuleDict) and active in copies:
        yield copies[active]
    yield from wrapper.modules()


ROOT = "(the model)"
"""How reports call a model that is an attention module itself: its name is the empty string."""

IN_PLACE = (
    "gfsa.plug changes the model in place and returns a report: write gfsa.plug(model), not "
    "model = gfsa.plug(model)"
)


class _Count(int):
    """A number of parameters; a model's ``parameters`` can be called."""

    def __call__(self) -> NoReturn:
        raise TypeError(f"report.parameters is a number and cannot be called. {IN_PLACE}")


@dataclass
class PlugReport:
    """What :func:`gfsa.plug` did, or would do."""

    plugged: dict[str, int] = field(default_factory=dict)
    """Module name → heads, in the model's order."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Module name → why it has no filter."""
    parameters: int = _Count(0)
    """How many learned numbers were added."""
    how: dict[str, str] = field(default_factory=dict)
    """Module name → how its forward calls the filter."""
    numbers: dict[str, int] = field(default_factory=dict)
    """Module name → the number by which ``layers=`` takes it, of every layer that it can take."""
    dry_run: bool = False
    """Whether the model was left unchanged."""
    note: str = ""
    """How the filters change what the model computes before they learn; empty if they do not."""

    # after model = gfsa.plug(model), a report is asked for what a model has
    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"PlugReport has no attribute {name!r}. {IN_PLACE}")

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(f"a PlugReport cannot be called. {IN_PLACE}")

    def __str__(self) -> str:
        layers = counted(len(self.plugged), "layer")
        numbers = counted(self.parameters, "learned number")
        headline = f"{'would plug' if self.dry_run else 'plugged'} {layers}, {numbers}"
        heads = {name: counted(number, "head") for name, number in self.plugged.items()}
        changed = {name: f"{heads[name]}, {how}" for name, how in self.how.items()}
        text = report_text(headline, changed, self.skipped, self.numbers)
        return f"{text}\n  {self.note}" if self.note else text


def report_of(
    planned: Iterable[tuple[Site, GraphFilter]],
    skipped: Mapping[str, str],
    found: Mapping[str, Site] | None = None,
) -> PlugReport:
    """The report of planned filters, of layers that get none, and of the numbers of all sites."""
    planned = list(planned)
    accepting = [name for name, site in (found or {}).items() if site.refusal is None]
    return PlugReport(
        plugged={site.name: filter.num_heads for site, filter in planned},
        skipped=dict(skipped),
        parameters=parameters_in(planned),
        how={site.name: site.adapter.how for site, _ in planned},
        numbers={name: number for number, name in enumerate(accepting, start=1)},
    )


def parameters_in(planned: Iterable[tuple[Site, GraphFilter]]) -> int:
    """How many learned numbers planned filters have."""
    return _Count(sum(p.numel() for _, filter in planned for p in filter.parameters()))


def report_text(
    headline: str,
    changed: Mapping[str, str],
    skipped: Mapping[str, str],
    numbers: Mapping[str, int] | None = None,
) -> str:
    """A report as text: layer → what became of it, by number, then the skipped ones by reason."""
    numbers = numbers or {name: number for number, name in enumerate(changed, start=1)}
    lines = [f"{headline} ({len(skipped)} skipped)"]
    lines += [f"  {numbers[name]:>3}  {name or ROOT}: {what}" for name, what in changed.items()]
    for reason, names in _by_reason(skipped).items():
        # one that was left out has a number, too
        number = numbers.get(names[0], "-") if len(names) == 1 else "-"
        lines.append(f"  {number:>3}  {_shortened(names)}: {reason}")
    return "\n".join(lines)


def grouped_reasons(refused: Mapping[str, str]) -> list[str]:
    """A line for each reason, with the layers that have it."""
    return [f"{_shortened(names)}: {reason}" for reason, names in _by_reason(refused).items()]


def listed_reasons(refused: Mapping[str, str]) -> str:
    """Refused layers for an error, a line for each reason."""
    return "".join(f"\n  {line}" for line in grouped_reasons(refused))


def counted(number: int, noun: str) -> str:
    """``1 layer``, ``2 layers``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _by_reason(skipped: Mapping[str, str]) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for name, reason in skipped.items():
        # reasons that differ in the layer's own name alone are one
        names.setdefault(reason.replace(name, "…") if len(name) > 3 else reason, []).append(name)
    return {
        reason if len(group) > 1 else skipped[group[0]]: group for reason, group in names.items()
    }


def _shortened(names: list[str]) -> str:
    if len(names) < 3:
        return ", ".join(name or ROOT for name in names)
    return f"{names[0]} … {names[-1]} ({len(names)} layers)"


Layers = str | Iterable[int | str] | Callable[[str, nn.Module], bool]

NOT_SELECTED = "not among the selected layers"
"""The reason in reports for a layer that ``layers`` leaves out."""

_EXPECTED = (
    "layers must be 'all', 'even', 'odd', 'lower', 'upper', numbers counted from 1, names or "
    "patterns such as 'encoder.*', or a predicate (name, module)"
)


def select_layers(candidates: Mapping[str, nn.Module], layers: Layers) -> set[str]:
    """The names among ``candidates`` that ``layers`` selects, as described at :func:`gfsa.plug`.

    Candidates are counted from 1, over the whole model, as the paper counts. The middle layer of an
    odd number of them belongs to the upper half, which is next to the output.
    """
    names = list(candidates)
    halves = {
        "all": names,
        "odd": names[::2],
        "even": names[1::2],
        "lower": names[: len(names) // 2],
        "upper": names[len(names) // 2 :],
    }
    if callable(layers):
        selected = {name for name, module in candidates.items() if layers(name, module)}
    elif not isinstance(layers, Iterable):
        raise ValueError(f"{_EXPECTED}; got {layers!r}")
    elif isinstance(layers, str):
        selected = set(halves[layers] if layers in halves else _meant(layers, names))
    else:
        selected = {name for one in layers for name in _meant(one, names)}
    if names and not selected:
        raise ValueError(
            f"layers={layers!r} selects none of the model's "
            f"{counted(len(names), 'self-attention layer')} (depths that share one module, as in "
            "ALBERT, are one layer); select at least one"
        )
    return selected


def _meant(one: Any, names: list[str]) -> list[str]:
    """The layers that a number, a name or a pattern means; a name: what is inside that, too."""
    if isinstance(one, str):
        found = fnmatch.filter(names, one) + fnmatch.filter(names, f"{one}.*")
        if not found:
            shown = ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
            raise ValueError(f"{_EXPECTED}; got {one!r}, which matches none of {shown}")
        return found
    if isinstance(one, bool) or not hasattr(one, "__index__"):
        raise ValueError(f"{_EXPECTED}; got {one!r} among them")
    number = operator.index(one)
    if not 1 <= number <= len(names):
        raise ValueError(
            f"there is no layer {number}: the model has "
            f"{counted(len(names), 'self-attention layer')} that can be plugged, counted from 1"
        )
    return [names[number - 1]]
