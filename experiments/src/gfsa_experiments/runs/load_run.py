"""Load the trained model of a run from its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gfsa_experiments.engine.config import field_names
from gfsa_experiments.engine.task import Task
from gfsa_experiments.runs.methods import MethodConfig
from gfsa_experiments.runs.run import Run, build_task, read_json
from gfsa_experiments.tasks import find_recipe


def trained_task(folder: Path, data_dir: Path, device: torch.device | str = "cpu") -> Task:
    """The task of a run with its trained model, in evaluation mode.

    Args:
        folder: the folder of a run with ``save_model=true``.
        data_dir: where its data set is.
        device: where the model goes.
    """
    weights = folder / "model.pt"
    if not weights.exists():
        raise FileNotFoundError(f"{weights} does not exist; train with --set save_model=true")
    written = read_json(folder / "config.json")
    kind = find_recipe(written["recipe"]).config
    run = Run(
        recipe=written["recipe"],
        config=kind(**_fields(kind, written)),
        method=written["method"],
        options=MethodConfig(**_fields(MethodConfig, written["options"])),
        data_dir=data_dir,
    )
    task = build_task(run)
    task.model.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    task.model.to(device).eval()
    return task


def _fields(config: Any, written: dict[str, Any]) -> dict[str, Any]:
    """The fields of a config from JSON, which turned tuples into lists."""
    found = {name: written[name] for name in field_names(config)}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in found.items()}
