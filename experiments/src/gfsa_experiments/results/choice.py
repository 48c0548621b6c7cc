"""Which tables and families a command asks for; a ValueError names what does not exist."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gfsa_experiments.results.families import Family
from gfsa_experiments.results.family_summary import Judged
from gfsa_experiments.results.tables import ResultTable


def chosen_tables(
    tables: Sequence[ResultTable], judged: Sequence[Judged], recipe: str, task: str, method: str
) -> list[ResultTable]:
    """The exploratory tables and lines of a recipe, a task and methods; all of them without."""
    of_recipe = tables_of(tables, recipe)
    if recipe and not of_recipe:
        recipes = sorted({table.recipe for table in tables})
        raise ValueError(
            f"no exploratory run of recipe {recipe!r}; there are {', '.join(recipes) or 'none'}"
            + _see_families(judged, recipe)
        )
    kept = tables_of(of_recipe, task=task)
    if task and not kept:
        tasks = sorted({table.task for table in of_recipe})
        raise ValueError(
            f"no task with {task!r} in its name; there are {', '.join(tasks) or 'none'}"
            + _see_families(judged, recipe, task)
        )
    methods = {name.strip() for name in method.split(",") if name.strip()}
    return _of_methods(kept, methods) if methods else kept


def tables_of(tables: Sequence[ResultTable], recipe: str = "", task: str = "") -> list[ResultTable]:
    return [t for t in tables if recipe in ("", t.recipe) and task in t.task]


def families_of(judged: Sequence[Judged], recipe: str = "", task: str = "") -> list[Judged]:
    """The families with a comparison on such a task."""
    return [(family, found) for family, found in judged if _is_on(family, recipe, task)]


def family_named(judged: Sequence[Judged], name: str) -> Judged:
    found = {family.name: (family, outcomes) for family, outcomes in judged}
    if name not in found:
        raise ValueError(f"there is no family {name!r}; there are {', '.join(found) or 'none'}")
    return found[name]


def _is_on(family: Family, recipe: str, task: str) -> bool:
    tasks = [own for comparison in family.comparisons for own in comparison.tasks]
    return any(recipe in ("", own) and task in name for own, name in tasks)


def _see_families(judged: Sequence[Judged], recipe: str, task: str = "") -> str:
    """Which families have runs of a recipe and task, for a message; empty if none has."""
    names = [family.name for family, _ in families_of(judged, recipe, task)]
    return f". Runs of families are shown by --family: {', '.join(names)}" if names else ""


def _of_methods(tables: Sequence[ResultTable], wanted: set[str]) -> list[ResultTable]:
    """The tables that have a line of these methods, with those lines and the plain ones."""
    methods = {line.method for table in tables for line in table.lines}
    if wanted - methods:
        raise ValueError(
            f"no run of method {', '.join(sorted(wanted - methods))}; "
            f"there are {', '.join(sorted(methods))}"
        )
    kept = wanted | {"plain"}
    return [
        replace(
            table,
            lines=tuple(line for line in table.lines if line.method in kept),
            replaced=table.replaced[table.replaced.method.isin(list(kept))],
        )
        for table in tables
        if any(line.method in wanted for line in table.lines)
    ]
