"""From the command line to runs."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gfsa.recipes import find_recipe
from gfsa.recipes.config import field_names, override
from gfsa.recipes.methods import METHODS, MethodConfig, find_method
from gfsa.recipes.row import read_rows
from gfsa.recipes.run import Key, Run

# more runs than anybody means
_MOST_NUMBERS = 10_000


@dataclass(frozen=True)
class Request:
    """What one line asks for: a recipe, and the methods, orders and seeds to run it with."""

    recipe: str
    methods: tuple[str, ...] = ("plain",)
    orders: tuple[int, ...] = ()
    seeds: tuple[int, ...] = (0,)
    settings: tuple[tuple[str, str], ...] = ()
    each: tuple[tuple[str, str], ...] = ()
    """Settings with several values by commas, every combination of which is run."""

    def runs(self, **places: Any) -> list[Run]:
        """Every combination, checked; a method without K is run once for all of them."""
        if self.each:
            return self._runs_of_each(**places)
        recipe = find_recipe(self.recipe)
        for_recipe, for_method = self._sorted(recipe.config)
        config = override(recipe.config(), for_recipe)
        runs: list[Run] = []
        for name, order, seed in itertools.product(
            self.methods, self.orders or (None,), self.seeds
        ):
            uses = find_method(name).uses
            # options of one method do not concern another of the same line
            given = {key: text for key, text in for_method.items() if key in uses}
            options = override(MethodConfig(), given)
            if order is not None and "K" in uses:
                options = dataclasses.replace(options, K=order)
            run = Run(
                recipe=self.recipe,
                config=dataclasses.replace(config, seed=seed),
                method=name,
                options=options,
                **places,
            )
            run.check()
            if all(run.folder != other.folder for other in runs):
                runs.append(run)
        self._check_used(for_method)
        return runs

    def _runs_of_each(self, **places: Any) -> list[Run]:
        names = [name for name, _ in self.each]
        given = [*names, *dict(self.settings)]
        twice = sorted({name for name in given if given.count(name) > 1})
        if twice:
            raise ValueError(
                f"{', '.join(twice)} given twice, by --each or by --each and --set: give all "
                "values to one --each, by commas"
            )
        runs: list[Run] = []
        for values in itertools.product(*(text.split(",") for _, text in self.each)):
            chosen = tuple(zip(names, (value.strip() for value in values), strict=True))
            one = dataclasses.replace(self, settings=self.settings + chosen, each=())
            runs += one.runs(**places)
        return runs

    def _sorted(self, config: Any) -> tuple[dict[str, str], dict[str, str]]:
        """Settings of the recipe, and options of the methods."""
        of_recipe, of_method = field_names(config), field_names(MethodConfig)
        settings = dict(self.settings)
        if "seed" in settings:
            raise ValueError("seeds are given by --seeds, not by --set seed=…")
        for_method = {k: v for k, v in settings.items() if k in of_method and k not in of_recipe}
        return {k: v for k, v in settings.items() if k not in for_method}, for_method

    def _check_used(self, for_method: dict[str, str]) -> None:
        uses = {option for name in self.methods for option in find_method(name).uses}
        if self.orders and "K" in for_method:
            raise ValueError("K is given by --K and by --set K=…; leave one of them out")
        unused = [*(name for name in for_method if name not in uses)]
        if self.orders and "K" not in uses:
            unused.append("K")
        if unused:
            raise ValueError(
                f"none of the methods {', '.join(self.methods)} has an option "
                f"{', '.join(unused)}; theirs: {', '.join(sorted(uses)) or 'none'}"
            )


def read_plan(path: Path) -> list[Request]:
    """A file with the arguments of ``gfsa train`` on each line.

    ``#`` begins a comment; ``common`` and arguments on a line give these to every line below, up
    to the next ``common``.
    """
    return [request for _, request in _lines_of(path)]


def runs_of_plan(path: Path, **places: Any) -> list[Run]:
    """The runs of every line; what is wrong is said with its line."""
    runs: list[Run] = []
    for number, request in _lines_of(path):
        try:
            runs += request.runs(**places)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from error
    return runs


def _lines_of(path: Path) -> list[tuple[int, Request]]:
    requests = []
    common: list[str] = []
    # some editors begin a file with a mark
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), start=1):
        try:
            words = shlex.split(line, comments=True)
            if words[:1] == ["common"]:
                common = words[1:]
            elif words:
                requests.append((number, _parse(words[0], [*common, *words[1:]])))
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from error
    if not requests:
        raise ValueError(f"{path} has no runs in it")
    return requests


def _parse(recipe: str, rest: list[str]) -> Request:
    request: dict[str, Any] = {}
    settings: dict[str, str] = {}
    each: list[tuple[str, str]] = []
    while rest:
        flag = rest.pop(0)
        if not rest:
            raise ValueError(f"{flag} needs a value")
        value = rest.pop(0)
        if flag == "--method":
            request["methods"] = names_of(value)
        elif flag == "--K":
            request["orders"] = numbers_of("--K", value)
        elif flag == "--seeds":
            request["seeds"] = numbers_of("--seeds", value)
        elif flag == "--set":
            settings |= [setting_of(value)]
        elif flag == "--each":
            each.append(setting_of(value))
        else:
            raise ValueError(f"a plan knows --method, --K, --seeds, --set and --each, got {flag!r}")
    return Request(recipe, settings=tuple(settings.items()), each=tuple(each), **request)


def lacking(runs: Sequence[Run], results: Path) -> list[Run]:
    """The runs that have no row in ``results`` yet."""
    tables = {results / f"{run.key().recipe}.csv" for run in runs}
    known = {
        Key(row.recipe, row.task, row.method, row.options, row.settings, row.seed)
        for path in tables
        # who is to add the first row begins with an empty file
        if path.exists() and path.stat().st_size
        for row in read_rows(path)
    }
    return [run for run in runs if run.key() not in known]


def names_of(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise ValueError(f"--method takes some of {', '.join(METHODS)}, got {text!r}")
    return names


def numbers_of(flag: str, text: str) -> tuple[int, ...]:
    """``0-4`` or ``0,1,2``, or a mixture."""
    try:
        ranges = [_range_of(part) for part in text.split(",")]
    except ValueError:
        ranges = []
    if not any(map(len, ranges)):
        raise ValueError(f"{flag} takes numbers such as 0,1,2 or 0-4, got {text!r}")
    if sum(map(len, ranges)) > _MOST_NUMBERS:
        raise ValueError(f"{flag} takes at most {_MOST_NUMBERS} numbers, got {text!r}")
    return tuple(dict.fromkeys(number for each in ranges for number in each))


def _range_of(text: str) -> range:
    """``3``, or ``0-4``."""
    first, dash, last = text.strip().partition("-")
    return range(int(first), int(last if dash else first) + 1)


def setting_of(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ValueError(f"--set takes key=value, got {text!r}")
    return name.strip(), value.strip()
