"""What the lens measures of a model, as numbers by depth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gfsa.lens import diagnose
from gfsa.lens.monitor import Monitor
from gfsa.lens.readings import ModelReading


def only(report: Any) -> ModelReading:
    """The reading of a report of one model."""
    (reading,) = report.models.values()
    return reading


def diagnosed(model: nn.Module, inputs: Any, **options: Any) -> dict[int, float]:
    """Similarity by depth, 0 for the input, by :func:`gfsa.diagnose`."""
    reading = only(diagnose(model, inputs, attention=False, spectral=False, **options))
    return {feature.depth: feature.cosine for feature in reading.features}


def monitored(model: nn.Module, *calls: Callable[[], object]) -> list[dict[int, float]]:
    """Similarity by depth in each of several steps, by the monitor."""
    logged: list[dict[str, float]] = []
    monitor = Monitor(model, lambda values, step: logged.append(values), every=1)
    for step, call in enumerate(calls):
        monitor.before_step(step)
        with torch.no_grad():
            call()
        monitor.after_step(step)
    start = "lens/cosine/"
    return [{int(n[len(start) :]): v for n, v in s.items() if n.startswith(start)} for s in logged]
