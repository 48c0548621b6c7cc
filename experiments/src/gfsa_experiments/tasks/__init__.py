"""The tasks: recipes, and the readers of their data.

A recipe is a :class:`~gfsa_experiments.engine.task.Recipe`; the command line finds it by its line
in ``recipes.csv``, or in a module of the user's own, where it is called ``RECIPE``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from gfsa_experiments.data.files import table

if TYPE_CHECKING:
    from gfsa_experiments.engine.task import Recipe

RECIPES = {line["name"]: line for line in table("gfsa_experiments.tasks", "recipes.csv")}


def find_recipe(name: str) -> Recipe:
    """The recipe called ``name``, or the ``RECIPE`` of the caller's module ``package.module``."""
    if name not in RECIPES and "." not in name:
        raise ValueError(
            f"there is no recipe {name!r}; there are {', '.join(RECIPES)}, "
            "or name a module of your own that has a RECIPE, with a dot: package.module"
        )
    line = RECIPES.get(name)
    module = name if line is None else f"gfsa_experiments.tasks.{line['module']}"
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"there is no module {error.name!r} with a recipe") from error
    except (ImportError, SyntaxError) as error:
        raise ValueError(f"the module {module} cannot be imported: {error}") from error
    from gfsa_experiments.engine.task import Recipe

    if line is not None:
        parts = getattr(found, line["config"]), getattr(found, line["task"])
        return Recipe(name, line["title"], *parts, line["extra"])
    recipe = getattr(found, "RECIPE", None)
    if not isinstance(recipe, Recipe):
        raise ValueError(
            f"the module {module} has no RECIPE, or it is not a "
            f"gfsa_experiments.engine.task.Recipe: got {type(recipe).__name__}"
        )
    return recipe
