"""The two ways to plug a model: by default, and with every module traced that can be."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

from torch import nn

import gfsa
from census.subject import Subject
from gfsa.plugs import registry
from gfsa.plugs.tracing.adapter import TRACER, TracerAdapter

Mode = Literal["default", "traced"]


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
