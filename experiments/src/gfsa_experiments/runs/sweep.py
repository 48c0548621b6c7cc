"""The runs of a sweep: every combination of methods, orders, seeds and settings, checked."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gfsa_experiments.engine.config import TrainConfig, field_names, from_text
from gfsa_experiments.runs.methods import (
    METHODS,
    MethodConfig,
    check_fit,
    check_options,
    find_method,
)
from gfsa_experiments.runs.run import Run
from gfsa_experiments.tasks import find_recipe

# a range with more numbers is a typing error
_MOST_NUMBERS = 10_000


@dataclass(frozen=True)
class Request:
    """The arguments of one ``gfsa train``: a recipe, and the methods, orders and seeds to run."""

    recipe: str
    methods: tuple[str, ...] = ("plain",)
    orders: tuple[int, ...] = ()
    seeds: tuple[int, ...] = (0,)
    settings: tuple[tuple[str, str], ...] = ()
    each: tuple[tuple[str, str], ...] = ()
    """Settings with several values, separated by commas; every combination of them is run."""

    @classmethod
    def from_arguments(
        cls,
        recipe: str,
        method: str,
        K: str,
        seeds: str,
        setting: Sequence[str] | None,
        each: Sequence[str] | None,
    ) -> Request:
        """A request from the arguments of the command, as text."""
        return cls(
            recipe,
            methods=_names_of(method),
            orders=numbers_of("--K", K) if K else (),
            seeds=numbers_of("--seeds", seeds),
            settings=tuple(_setting_of("--set", text) for text in setting or ()),
            each=tuple(_setting_of("--each", text) for text in each or ()),
        )

    def runs(self, **places: Any) -> list[Run]:
        """Every combination, checked; a method without the option K is run once, not per order.

        Args:
            places: further fields of :class:`Run`: ``data_dir``, ``out``, ``device`` …

        Raises:
            ValueError: for settings that make no sense or have no effect in any combination.
        """
        runs: list[Run] = []
        without_effect: list[dict[str, str]] = []
        for request in self._combinations():
            found, unused = request._runs(**places)
            runs += found
            without_effect.append(unused)
        # a setting without effect in one combination may be meant for another
        first, *others = without_effect
        unused = {name: why for name, why in first.items() if all(name in o for o in others)}
        if unused:
            reasons = "; ".join(f"{name} ({why})" for name, why in unused.items())
            raise ValueError(f"leave out settings that would have no effect: {reasons}")
        return one_per_folder(runs)

    def _runs(self, **places: Any) -> tuple[list[Run], dict[str, str]]:
        """The runs of one combination of settings, and why some settings have no effect."""
        recipe = find_recipe(self.recipe)
        for_recipe, for_method = self._split_settings(recipe.config)
        config, unused = _config(recipe.config, for_recipe)
        runs: dict[Path, Run] = {}
        used: set[str] = set()
        for name, order in itertools.product(self.methods, self.orders or (None,)):
            options, names = self._options(name, order, for_method)
            used.update(names)
            for seed in self.seeds:
                run = Run(
                    recipe=self.recipe,
                    config=dataclasses.replace(config, seed=seed),
                    method=name,
                    options=options,
                    **places,
                )
                run.check()
                runs.setdefault(run.folder, run)
        for name, options in dict.fromkeys((run.method, run.options) for run in runs.values()):
            check_options(name, options)
            model = config.sketch()
            if model is not None:
                check_fit(name, options, model, config.label())
        return list(runs.values()), unused | self._unused_options(for_method, used)

    def _options(
        self, name: str, order: int | None, for_method: dict[str, str]
    ) -> tuple[MethodConfig, tuple[str, ...]]:
        """The options of a method, and the names of those that have an effect."""
        method = find_method(name)
        # another method of the same request may read the others
        given = {key: text for key, text in for_method.items() if key in method.uses}
        if order is not None and "K" in method.uses:
            given["K"] = str(order)
        used = method.used_options(from_text(MethodConfig, given))
        return from_text(MethodConfig, {k: v for k, v in given.items() if k in used}), used

    def _combinations(self) -> list[Request]:
        """A request for each combination of the values in ``each``."""
        names = [name for name, _ in self.each]
        given = [*names, *(name for name, _ in self.settings)]
        twice = sorted({name for name in given if given.count(name) > 1})
        if twice:
            raise ValueError(
                f"{', '.join(twice)} given twice, by --set, by --each or by both: give one value "
                "to --set, or all values to one --each, separated by commas"
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

    def _split_settings(self, config: Any) -> tuple[dict[str, str], dict[str, str]]:
        """The settings of the recipe, and the options of the methods."""
        of_recipe, of_method = field_names(config), field_names(MethodConfig)
        settings = _with_full_names(config, dict(self.settings))
        if "seed" in settings:
            raise ValueError("seeds are given by --seeds, not by --set seed=…")
        for_method = {k: v for k, v in settings.items() if k in of_method and k not in of_recipe}
        return {k: v for k, v in settings.items() if k not in for_method}, for_method

    def _unused_options(self, for_method: dict[str, str], used: set[str]) -> dict[str, str]:
        """The options that none of the methods reads, with the reason."""
        if self.orders and "K" in for_method:
            raise ValueError("K is given by --K and by --set K=…; leave one of them out")
        given = [*for_method, *(["K"] if self.orders else [])]
        learn = for_method.get("learn")
        with_learn = f" with learn={learn}" if learn is not None else ""
        why = (
            f"none of the methods {', '.join(self.methods)} has such an option{with_learn}; their "
            f"options: {', '.join(sorted(used)) or 'none'}"
        )
        return {name: why for name in given if name not in used}


def one_per_folder(runs: Sequence[Run]) -> list[Run]:
    """The runs, each once; ValueError for different runs that rows could not tell apart."""
    folders: dict[Path, Run] = {}
    for run in runs:
        other = folders.setdefault(run.folder, run)
        if other.config == run.config:
            continue
        pairs = zip(vars(other.config).items(), vars(run.config).values(), strict=True)
        differing = "; ".join(f"{name}={a} and {name}={b}" for (name, a), b in pairs if a != b)
        raise ValueError(
            f"two runs would have the folder {run.folder}: {differing}. Give one value, or several "
            "commands with an --out each; of a path outside of the working folder only the last "
            "part counts, so rename one of them"
        )
    return list(folders.values())


def _config(kind: type[TrainConfig], given: dict[str, str]) -> tuple[TrainConfig, dict[str, str]]:
    """A recipe's config with the given settings, and those without effect, with the reason."""
    settings = dict(given)
    if "epochs" in given:
        # epochs override the max_steps that some recipes have by default
        settings.setdefault("max_steps", "0")
    config = from_text(kind, settings)
    if "epochs" in given and config.max_steps:
        raise ValueError(
            f"epochs={given['epochs']} and max_steps={config.max_steps} both say when to stop; "
            "leave one of them out"
        )
    unused = {name: why for name, why in config.unused().items() if name in given}
    # with them the row would look like that of another experiment
    return from_text(kind, {k: v for k, v in settings.items() if k not in unused}), unused


def _with_full_names(kind: type[TrainConfig], given: dict[str, str]) -> dict[str, str]:
    """The settings by the names that the config has for them."""
    full = dict(kind.short_names)
    for short, name in full.items():
        if short in given and name in given:
            raise ValueError(f"{short} and {name} are one setting; leave one of them out")
    return {full.get(name, name): text for name, text in given.items()}


def _names_of(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise ValueError(f"--method takes some of {', '.join(METHODS)}, got {text!r}")
    return names


def numbers_of(flag: str, text: str) -> tuple[int, ...]:
    """The numbers in ``0-4``, ``0,1,2`` or a mixture, each once."""
    try:
        ranges = [_range_of(part) for part in text.split(",")]
    except ValueError:
        ranges = []
    # an empty range such as 4-2 is a typing error
    if not ranges or not all(map(len, ranges)):
        raise ValueError(f"{flag} takes numbers such as 0,1,2 or 0-4, got {text!r}")
    if sum(map(len, ranges)) > _MOST_NUMBERS:
        raise ValueError(f"{flag} takes at most {_MOST_NUMBERS} numbers, got {text!r}")
    return tuple(dict.fromkeys(itertools.chain.from_iterable(ranges)))


def _range_of(text: str) -> range:
    """The range of ``3`` or ``0-4``."""
    first, dash, last = text.strip().partition("-")
    return range(int(first), int(last if dash else first) + 1)


def _setting_of(flag: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ValueError(f"{flag} takes key=value, got {text!r}")
    return name.strip(), value.strip()
