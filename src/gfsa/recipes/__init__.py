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
    "graph": "gfsa.recipes.graph.recipe",
    "speech": "gfsa.recipes.speech.recipe",
    "lra": "gfsa.recipes.lra",
    "pretrain": "gfsa.recipes.pretrain.recipe",
}


def find_recipe(name: str) -> Recipe:
    """The recipe called ``name``, or the one in a module of your own, ``package.module``."""
    if name not in RECIPES and "." not in name:
        raise ValueError(
            f"there is no recipe {name!r}; there are {', '.join(RECIPES)}, "
            "or name a module of your own that has a RECIPE, with a dot: package.module"
        )
    module = RECIPES.get(name, name)
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"there is no module {error.name!r} with a recipe") from error
    except (ImportError, SyntaxError) as error:
        raise ValueError(f"the module {module} cannot be imported: {error}") from error
    from gfsa.recipes.task import Recipe

    recipe = getattr(found, "RECIPE", None)
    if not isinstance(recipe, Recipe):
        raise ValueError(
            f"the module {module} has no RECIPE, or it is not a gfsa.recipes.task.Recipe: "
            f"got {type(recipe).__name__}"
        )
    return recipe
