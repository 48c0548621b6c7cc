"""The papers' settings for each model and data set, which become the recipe's defaults.

They are in ``settings.csv``: a line for each model, and one for each data set on which some of its
settings differ. Sources: the appendix of the GFSA paper and Graphormer's published scripts, and the
published configurations of GPS and Graph-ViT. A data set that a paper lacks gets the settings of
the most similar one. docs/recipes/graph.md lists the differences.
"""

from __future__ import annotations

import ast
from typing import Any

from gfsa_experiments.data.sources import table

Settings = dict[str, Any]

NOT_GIVEN: Any = None
"""The default of settings that follow the model and the data set."""


def _settings(line: dict[str, str]) -> Settings:
    """The settings that a line gives, with numbers and truth values as such."""
    given = {name: text for name, text in line.items() if text and name not in ("model", "data")}
    return {name: _value(text) for name, text in given.items()}


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except ValueError:
        return text


_SETTINGS = {
    (line["model"], line["data"]): _settings(line)
    for line in table("gfsa_experiments.tasks.graph", "settings.csv")
}
MODELS = tuple(dict.fromkeys(model for model, _ in _SETTINGS))
FOLLOWING = tuple(_SETTINGS[MODELS[0], ""])
"""The settings that follow the model and the data set."""

_GRAPHORMERS = ("graphormer-slim", "graphormer")
# settings that only some models read (graph/models.py, graph/recipe.py)
_READ_BY: dict[str, tuple[str, ...]] = {
    "ffn_width": _GRAPHORMERS,
    "mlp_dropout": _GRAPHORMERS,
    "local": ("gps",),
    "encoding": ("gps", "graph-vit"),
    "encoding_size": ("gps", "graph-vit"),
    "encoding_width": ("gps",),
    "pooling": ("gps",),
    "gnn_depth": ("graph-vit",),
    "patches": ("graph-vit",),
    "patch_hops": ("graph-vit",),
    "patch_walk_steps": ("graph-vit",),
}


def paper_settings(model: str, data: str) -> Settings:
    """The papers' settings for this model on this data set."""
    return _SETTINGS[model, ""] | _SETTINGS.get((model, data), {})


def unread_settings(model: str) -> dict[str, str]:
    """Settings that only other models read: name → reason."""
    return {
        name: f"model={model} does not use it; {' or '.join(readers)} would"
        for name, readers in _READ_BY.items()
        if model not in readers
    }
