"""The tasks, one folder each: its recipe and its data reader.

A recipe is a module with a :class:`~gfsa_experiments.engine.task.Recipe` called ``RECIPE``; the
command line finds it by its line here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gfsa_experiments.engine.task import Recipe

RECIPES = {
    "glue": "gfsa_experiments.tasks.glue.recipe",
    "text": "gfsa_experiments.tasks.text.recipe",
    "causal_lm": "gfsa_experiments.tasks.causal_lm.recipe",
    "code": "gfsa_experiments.tasks.code.recipe",
    "image": "gfsa_experiments.tasks.image.recipe",
    "graph": "gfsa_experiments.tasks.graph.recipe",
    "speech": "gfsa_experiments.tasks.speech.recipe",
    "lra": "gfsa_experiments.tasks.lra.recipe",
    "pretrain": "gfsa_experiments.tasks.pretrain.recipe",
    "stdlib": "gfsa_experiments.tasks.stdlib.recipe",
    "digits": "gfsa_experiments.tasks.digits.recipe",
}


def find_recipe(name: str) -> Recipe:
    """The recipe called ``name``, or the ``RECIPE`` of the caller's module ``package.module``."""
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
    from gfsa_experiments.engine.task import Recipe

    recipe = getattr(found, "RECIPE", None)
    if not isinstance(recipe, Recipe):
        raise ValueError(
            f"the module {module} has no RECIPE, or it is not a "
            f"gfsa_experiments.engine.task.Recipe: "
            f"got {type(recipe).__name__}"
        )
    return recipe
