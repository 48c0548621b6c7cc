"""A model of the census while it is plugged, in both ways: its filters, forwards and refusals."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

import gfsa
from census.differences import WrongError
from census.inputs import Batch
from census.reference import Layout, NoReferenceError, layout_of
from census.subject import OBSERVED, SHAPES, Subject, run
from census.tokens import TokenProbe
from census.verdict import one_line
from gfsa.plugs import registry
from gfsa.plugs.sites import sites
from gfsa.plugs.tracing.adapter import TRACER, TracerAdapter
from gfsa.plugs.tracing.capture import TraceError

# classes with as many windows as heads in some layer, read in their code
READ_LAYOUTS = {"LocallyGroupedAttn": Layout(-3), "MaskUnitAttention": Layout(-4)}
Mode = Literal["default", "traced"]
"""Plugged by default, or with every module traced that can be."""


def plan_of(subject: Subject, mode: Mode) -> dict[str, str]:
    with adapters(subject.model, mode):
        try:
            return gfsa.plug(subject.model, dry_run=True, unknown=unknown(mode)).how
        except ValueError:
            return {}


def unknown(mode: Mode) -> Any:
    return "trace" if mode == "traced" else "refuse"


@contextlib.contextmanager
def adapters(model: nn.Module, mode: Mode) -> Iterator[None]:
    """In the mode "traced", also modules that an adapter knows are traced."""
    before = dict(registry._registered)
    if mode == "traced":
        for name, module in model.named_modules():
            adapter = registry.find_adapter(module)
            if adapter is None or isinstance(adapter, TracerAdapter):
                continue
            with contextlib.suppress(Exception):
                if adapter.refusal(name, module) is None and TRACER.refusal(name, module) is None:
                    gfsa.register_adapter(type(module), TRACER)
    try:
        yield
    finally:
        registry._registered.clear()
        registry._registered.update(before)


def how_of(report: Any) -> str:
    return "; ".join(dict.fromkeys(report.how.values()))


class CacheRefusalError(Exception):
    """gfsa asks for a forward without a cache."""


class AnotherShapeError(Exception):
    """gfsa asks for another number of samples or tokens in the first forward of a module."""

    def __init__(self, reason: str, site: str) -> None:
        super().__init__(reason)
        self.site = site


class LateRefusalError(Exception):
    """A module that has a filter refuses its first forward."""

    def __init__(self, modules: dict[str, str], reason: str) -> None:
        super().__init__(reason)
        self.modules = modules
        self.reason = reason


def is_refusal(error: BaseException) -> bool:
    """Whether gfsa itself raised the error, with words of its own."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    ours = os.path.dirname(os.path.abspath(gfsa.__file__))
    return os.path.abspath(last).startswith(ours) and isinstance(
        error, ValueError | TypeError | NotImplementedError | TraceError
    )


class Check:
    """One subject in one mode, and what its forwards have shown."""

    def __init__(self, subject: Subject, mode: Mode) -> None:
        self.subject = subject
        self.mode: Mode = mode
        self.left_out: dict[str, str] = {}
        self.shapes: list[tuple[int, int]] = []
        """The (samples, length) that the model takes."""
        self.cache_refusal = ""
        self.how = ""
        self.error = 0.0

    def refuse_unreported(self) -> None:
        """Self-attention that the model computes must be plugged or skipped with a reason."""
        model = self.subject.model
        known = set(sites(model, unknown(self.mode)))
        missing = [
            name
            for name in self.subject.observations[0]
            if around(name, known) is None
            and not any(inner.startswith(f"{name}.") for inner in known)
        ]
        if missing:
            kinds = {type(model.get_submodule(name)).__name__ for name in missing}
            raise WrongError(
                f"self-attention that is neither plugged nor skipped: {missing[0]} and "
                f"{len(missing) - 1} more ({', '.join(sorted(kinds))})"
            )

    def refuse_without_powers(self, sites: set[str]) -> None:
        """Modules whose rows and columns are different tokens must not have a filter."""
        probe = TokenProbe(self.subject.model, sites)
        batch = self.subject.uncached(2, SHAPES[0][1])
        with probe.running():
            run(self.subject.model, batch)
        for name, why in probe.found.items():
            raise WrongError(f"{name} is plugged, but {why}")

    def plug(self, model: nn.Module) -> tuple[nn.Module, Any]:
        report = gfsa.plug(
            model,
            K=3,
            unknown=unknown(self.mode),
            layers=lambda name, module: name not in self.left_out,
        )
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for filter in gfsa.filters_of(model).values():
                numbers = torch.randn(filter.theta.shape, generator=generator) * 0.3
                filter.theta.copy_(numbers)
        return model.to(self.subject.dtype), report

    def run_plugged(self, plugged: nn.Module, batch: Batch) -> list[Tensor]:
        """A forward of the plugged model; a refusal names the modules to leave out."""
        stack: list[str] = []
        names = {id(m): name for name, m in plugged.named_modules() if hasattr(m, "gfsa")}
        handles = []
        for module in plugged.modules():
            if id(module) in names:
                name = names[id(module)]
                handles.append(
                    module.register_forward_pre_hook(
                        lambda m, a, name=name: stack.append(name), prepend=True
                    )
                )
                handles.append(module.register_forward_hook(lambda m, a, y: stack.clear()))
        try:
            return run(plugged, batch)
        except TimeoutError:
            raise
        except Exception as error:
            if not stack or not is_refusal(error):
                raise
            if self.subject.caches and "use_cache" not in batch and "use_cache=False" in str(error):
                raise CacheRefusalError(one_line(error)) from error
            if "run the first forward with another" in str(error).lower():
                raise AnotherShapeError(one_line(error), stack[-1]) from error
            at = stack[-1]
            reason = one_line(error, 300).replace(at, "…")
            raise LateRefusalError({at: reason}, reason) from error
        finally:
            for handle in handles:
                handle.remove()

    def observe(self, thetas: Mapping[str, Tensor]) -> dict[str, Layout]:
        """Where the heads of each plugged module are."""
        sites = set(thetas)
        before, after, corner = self.subject.observations
        layouts = {}
        for name, seen in before.items():
            site = around(name, sites)
            if site is None or not seen.maps:
                continue
            maps = [other[name].maps[0] for other in (before, after, corner)]
            try:
                layouts[site] = layout_of(*maps, len(thetas[site]), OBSERVED)
            except NoReferenceError as error:
                kind = type(self.subject.model.get_submodule(site)).__name__
                if kind not in READ_LAYOUTS:
                    raise NoReferenceError(f"{site}: {error}") from error
                layouts[site] = READ_LAYOUTS[kind]
        return layouts

    def judge(self, error: float, tolerance: float, what: str) -> None:
        self.error = max(self.error, error)
        if not error <= tolerance:
            raise WrongError(f"{what}: off by {error:.1e} (rounding: {tolerance:.0e})")


def around(name: str, known: set[str]) -> str | None:
    """The module itself, or the innermost one around it, that the report names."""
    while True:
        if name in known:
            return name
        if not name:
            return None
        name = name.rpartition(".")[0]
