"""From the command line to runs."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gfsa_experiments.tasks import find_recipe
from gfsa_experiments.engine.config import TrainConfig, field_names, from_text
from gfsa_experiments.engine.devices import check_device
from gfsa_experiments.engine.methods import METHODS, MethodConfig, check_fit, check_options, find_method
from gfsa_experiments.runs.row import read_rows
from gfsa_experiments.runs.run import Key, Run

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
        """Every combination, checked; a method without K is run once for all of them.

        Raises:
            ValueError: for what makes no sense, and for what is given and nobody reads.
        """
        check_device(places.get("device", "auto"))
        runs: list[Run] = []
        unread: list[dict[str, str]] = []
        for one in self._combinations():
            found, without_effect = one._runs(**places)
            runs += found
            unread.append(without_effect)
        # what one combination has no use for may be meant for another
        nobody = {name: why for name, why in unread[0].items() if all(name in u for u in unread)}
        if nobody:
            reasons = "; ".join(f"{name} ({why})" for name, why in nobody.items())
            raise ValueError(f"what would change nothing must be left out: {reasons}")
        return runs

    def _runs(self, **places: Any) -> tuple[list[Run], dict[str, str]]:
        """Runs of one combination of settings, and which of these it has no use for, and why."""
        recipe = find_recipe(self.recipe)
        for_recipe, for_method = self._sorted(recipe.config)
        config, unread = _config(recipe.config, for_recipe)
        runs: list[Run] = []
        used: set[str] = set()
        for name, order in itertools.product(self.methods, self.orders or (None,)):
            options, uses = self._options(name, order, for_method)
            used.update(uses)
            for seed in self.seeds:
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
        for name, options in dict.fromkeys((run.method, run.options) for run in runs):
            check_options(name, options)
            _check_model(config, name, options)
        return runs, unread | self._unused_options(for_method, used)

    def _options(
        self, name: str, order: int | None, for_method: dict[str, str]
    ) -> tuple[MethodConfig, tuple[str, ...]]:
        """The options of a method, and those that it uses if they are these."""
        method = find_method(name)
        # options of one method do not concern another of the same line
        given = {key: text for key, text in for_method.items() if key in method.uses}
        if order is not None and "K" in method.uses:
            given["K"] = str(order)
        uses = method.uses_beside(from_text(MethodConfig, given))
        return from_text(MethodConfig, {k: v for k, v in given.items() if k in uses}), uses

    def _combinations(self) -> list[Request]:
        """A request for each combination of the values that ``each`` gives."""
        names = [name for name, _ in self.each]
        given = [*names, *dict(self.settings)]
        twice = sorted({name for name in given if given.count(name) > 1})
        if twice:
            raise ValueError(
                f"{', '.join(twice)} given twice, by --each or by --each and --set: give all "
                "values to one --each, by commas"
            )
        combinations = itertools.product(*(text.split(",") for _, text in self.each))
        return [
            dataclasses.replace(
                self,
                settings=self.settings + tuple(zip(names, map(str.strip, values), strict=True)),
                each=(),
            )
            for values in combinations
        ]

    def _sorted(self, config: Any) -> tuple[dict[str, str], dict[str, str]]:
        """Settings of the recipe, and options of the methods."""
        of_recipe, of_method = field_names(config), field_names(MethodConfig)
        settings = dict(self.settings)
        if "seed" in settings:
            raise ValueError("seeds are given by --seeds, not by --set seed=…")
        for_method = {k: v for k, v in settings.items() if k in of_method and k not in of_recipe}
        return {k: v for k, v in settings.items() if k not in for_method}, for_method

    def _unused_options(self, for_method: dict[str, str], uses: set[str]) -> dict[str, str]:
        """Options that none of the methods reads, and why."""
        if self.orders and "K" in for_method:
            raise ValueError("K is given by --K and by --set K=…; leave one of them out")
        given = [*for_method, *(["K"] if self.orders else [])]
        learn = for_method.get("learn")
        beside = f" beside learn={learn}" if learn is not None else ""
        why = (
            f"none of the methods {', '.join(self.methods)} has such an option{beside}; theirs: "
            f"{', '.join(sorted(uses)) or 'none'}"
        )
        return {name: why for name in given if name not in uses}


def _config(kind: type[TrainConfig], given: dict[str, str]) -> tuple[TrainConfig, dict[str, str]]:
    """A recipe's config with the settings that are given, and those it has no use for, and why."""
    settings = dict(given)
    if "epochs" in given:
        # some recipes count steps unless they are told otherwise; this is told otherwise
        settings.setdefault("max_steps", "0")
    config = from_text(kind, settings)
    if "epochs" in given and config.max_steps:
        raise ValueError(
            f"epochs={given['epochs']} and max_steps={config.max_steps} both say when to stop; "
            "leave one of them out"
        )
    unread = {name: why for name, why in config.unused().items() if name in given}
    # left in, they would make it look like another experiment
    return from_text(kind, {k: v for k, v in settings.items() if k not in unread}), unread


def _check_model(config: TrainConfig, method: str, options: MethodConfig) -> None:
    """Raise ValueError for a model that there is not, or that the method cannot be put into."""
    model = config.sketch()
    if model is not None:
        check_fit(method, options, model, config.label())


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
    # 4-2 is no number: whoever wrote it meant some
    if not ranges or not all(map(len, ranges)):
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
