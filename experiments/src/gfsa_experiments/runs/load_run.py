"""A run's trained model, back from its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from gfsa_experiments.tasks import find_recipe
from gfsa_experiments.engine.config import field_names
from gfsa_experiments.engine.methods import MethodConfig, find_method
from gfsa_experiments.engine.randomness import seed_everything
from gfsa_experiments.engine.task import Task


def trained_task(folder: Path, data_dir: Path, device: torch.device | str = "cpu") -> Task:
    """The task of a run with its model as trained, in evaluation mode.

    Args:
        folder: of a run made with ``--set save_model=true``.
        data_dir: where its data set lies.
        device: where the model goes.
    """
    weights = folder / "model.pt"
    if not weights.exists():
        raise FileNotFoundError(f"{weights} is not there; train with --set save_model=true")
    written = json.loads((folder / "config.json").read_text())
    recipe = find_recipe(written["recipe"])
    config = recipe.config(**_fields(recipe.config, written))
    seed_everything(config.seed)
    task = recipe.build(config, data_dir)
    options = MethodConfig(**_fields(MethodConfig, written["options"]))
    find_method(written["method"]).apply(task.model, options)
    task.model.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    task.model.to(device).eval()
    return task


def _fields(config: Any, written: dict[str, Any]) -> dict[str, Any]:
    """Fields from JSON, where tuples had become lists."""
    found = {name: written[name] for name in field_names(config)}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in found.items()}
