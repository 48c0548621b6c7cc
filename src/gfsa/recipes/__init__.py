"""Recipes: experiments that anybody can run again, on one training loop.

A recipe is a module with a :class:`~gfsa.recipes.task.Recipe` called ``RECIPE``; its line here is
all that the command line needs to know of it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gfsa.recipes.task import Recipe

RECIPES = {
    "glue": "gfsa.recipes.glue",
    "causal_lm": "gfsa.recipes.causal_lm",
    "code": "gfsa.recipes.code",
    "image": "gfsa.recipes.image",
    "graph": "gfsa.recipes.graph",
    "speech": "gfsa.recipes.speech",
    "lra": "gfsa.recipes.lra",
}


def find_recipe(name: str) -> Recipe:
    """The recipe called ``name``."""
    if name not in RECIPES:
        raise ValueError(f"there is no recipe {name!r}; there are {', '.join(RECIPES)}")
    recipe: Recipe = import_module(RECIPES[name]).RECIPE
    return recipe
