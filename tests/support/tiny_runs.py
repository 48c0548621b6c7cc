"""A run of a recipe on small data, on the CPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from gfsa_experiments.runs.methods import MethodConfig
from gfsa_experiments.runs.run import Run


def tiny_run(
    recipe: str, config: Any, data: Path, out: Path, method: str = "plain", **settings: Any
) -> Run:
    """The run of one method, at the rate of filters that the pages give for GFSA."""
    return Run(
        recipe=recipe,
        config=dataclasses.replace(config, **settings),
        method=method,
        options=MethodConfig(filter_lr=1e-2 if method == "gfsa" else None),
        data_dir=data,
        out=out,
        device="cpu",
    )
