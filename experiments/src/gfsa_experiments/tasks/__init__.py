"""The tasks: recipes, and the readers of their data.

A recipe is a :class:`~gfsa_experiments.engine.task.Recipe`; the command line finds it by its line
here, or in a module of the user's own, where it is called ``RECIPE``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gfsa_experiments.engine.task import Recipe

RECIPES = {
    "glue": "gfsa_experiments.tasks.texts:GLUE",
    "text": "gfsa_experiments.tasks.texts:TEXT",
    "causal_lm": "gfsa_experiments.tasks.pretrain.recipe:CAUSAL_LM",
    "code": "gfsa_experiments.tasks.texts:CODE",
    "image": "gfsa_experiments.tasks.image",
    "graph": "gfsa_experiments.tasks.graph.recipe",
    "speech": "gfsa_experiments.tasks.speech.recipe",
    "lra": "gfsa_experiments.tasks.lra",
    "pretrain": "gfsa_experiments.tasks.pretrain.recipe:PRETRAIN",
    "stdlib": "gfsa_experiments.tasks.pretrain.recipe:STDLIB",
}


def find_recipe(name: str) -> Recipe:
    """The recipe called ``name``, or the ``RECIPE`` of the caller's module ``package.module``."""
    if name not in RECIPES and "." not in name:
        raise ValueError(
            f"there is no recipe {name!r}; there are {', '.join(RECIPES)}, "
            "or name a module of your own that has a RECIPE, with a dot: package.module"
        )
    module, _, attribute = RECIPES.get(name, name).partition(":")
    attribute = attribute or "RECIPE"
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"there is no module {error.name!r} with a recipe") from error
    except (ImportError, SyntaxError) as error:
        raise ValueError(f"the module {module} cannot be imported: {error}") from error
    from gfsa_experiments.engine.task import Recipe

    recipe = getattr(found, attribute, None)
    if not isinstance(recipe, Recipe):
        raise ValueError(
            f"the module {module} has no {attribute}, or it is not a "
            f"gfsa_experiments.engine.task.Recipe: got {type(recipe).__name__}"
        )
    return recipe
