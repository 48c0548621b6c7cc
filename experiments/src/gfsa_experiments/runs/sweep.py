"""The runs of a sweep: every combination of methods, orders, seeds and settings, checked."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gfsa_experiments.engine.config import TrainConfig, field_names, from_text
from gfsa_experiments.runs.methods import METHODS, MethodConfig, check_options, find_method
from gfsa_experiments.runs.run import Run
from gfsa_experiments.tasks import find_recipe

# a range with more numbers is a typing error
_MOST_NUMBERS = 10_000


@dataclass(frozen=True)
class Request:
    """The arguments of one ``gfsa train`` as they are typed: what to run, and its settings."""

    recipe: str
    method: str = "plain"
    K: str = ""
    seeds: str = "0"
    setting: Sequence[str] | None = None
    each: Sequence[str] | None = None
    """Settings with several values, separated by commas; every combination of them is run."""

    @property
    def line(self) -> str:
        """The line of a plan for a request without ``K`` and ``each``."""
        flags = "".join(f" --set {shlex.quote(text)}" for text in self.setting or ())
        return f"{self.recipe} --method {self.method} --seeds {self.seeds}{flags}"

    def runs(self, **places: Any) -> list[Run]:
        """Every combination, checked; a method without an option is run once, not per value.

        ``places`` are further fields of :class:`Run`. Settings that make no sense, or have no
        effect in any combination, raise ValueError.
        """
        methods = [name.strip() for name in self.method.split(",") if name.strip()]
        if not methods:
            raise ValueError(f"--method takes some of {', '.join(METHODS)}, got {self.method!r}")
        found = [self._runs(methods, settings, places) for settings in self._combinations()]
        # a setting without effect in one combination may be meant for another
        (_, first), *others = found
        unused = {k: why for k, why in first.items() if all(k in other for _, other in others)}
        if unused:
            reasons = "; ".join(f"{name} ({why})" for name, why in unused.items())
            raise ValueError(f"leave out settings that would have no effect: {reasons}")
        return one_per_folder([run for runs, _ in found for run in runs])

    def _runs(
        self, methods: Sequence[str], settings: dict[str, str], places: dict[str, Any]
    ) -> tuple[list[Run], dict[str, str]]:
        """The runs of one combination of settings, and why some settings have no effect."""
        recipe = find_recipe(self.recipe)
        for_recipe, for_method = _split_settings(settings, recipe.config)
        config, unused = _config(recipe.config, for_recipe)
        runs: list[Run] = []
        used: set[str] = set()
        for name in methods:
            method = find_method(name)
            # another method of the same request may read the others
            given = {key: text for key, text in for_method.items() if key in method.uses}
            having_effect = method.used_options(from_text(MethodConfig, given))
            used.update(having_effect)
            kept = {key: text for key, text in given.items() if key in having_effect}
            options = from_text(MethodConfig, kept)
            for seed in numbers_of("--seeds", self.seeds):
                seeded = dataclasses.replace(config, seed=seed)
                run = Run(recipe=self.recipe, config=seeded, method=name, options=options, **places)
                run.check()
                runs.append(run)
            check_options(name, options, config.sketch(), config.label())
        with_learn = f" with learn={for_method['learn']}" if "learn" in for_method else ""
        why = (
            f"none of the methods {', '.join(methods)} has such an option{with_learn}; their "
            f"options: {', '.join(sorted(used)) or 'none'}"
        )
        return runs, unused | {k: why for k in for_method if k not in used}

    def _combinations(self) -> list[dict[str, str]]:
        """The settings with each combination of the values in ``each``."""
        settings = [_setting_of("--set", text) for text in self.setting or ()]
        several = [_setting_of("--each", text) for text in self.each or ()]
        if self.K:
            several.append(("K", ",".join(map(str, numbers_of("--K", self.K)))))
        names = [name for name, _ in several]
        given = [*names, *(name for name, _ in settings)]
        twice = sorted({name for name in given if given.count(name) > 1})
        if twice:
            raise ValueError(
                f"{', '.join(twice)} given twice, by --set, --each or --K: give one value "
                "to --set, or all values to one --each, separated by commas"
            )
        combinations = itertools.product(*(text.split(",") for _, text in several))
        return [
            dict(settings) | dict(zip(names, map(str.strip, values), strict=True))
            for values in combinations
        ]


def _split_settings(settings: dict[str, str], config: Any) -> tuple[dict[str, str], dict[str, str]]:
    """The settings of the recipe, and the options of the methods."""
    of_recipe, of_method = field_names(config), field_names(MethodConfig)
    full = dict(config.short_names)
    for short, name in full.items():
        if short in settings and name in settings:
            raise ValueError(f"{short} and {name} are one setting; leave one of them out")
    settings = {full.get(name, name): text for name, text in settings.items()}
    if "seed" in settings:
        raise ValueError("seeds are given by --seeds, not by --set seed=…")
    for_method = {k: v for k, v in settings.items() if k in of_method and k not in of_recipe}
    return {k: v for k, v in settings.items() if k not in for_method}, for_method


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


def numbers_of(flag: str, text: str) -> tuple[int, ...]:
    """The numbers in ``0-4``, ``0,1,2`` or a mixture, each once."""
    ranges = []
    try:
        for part in text.split(","):
            first, dash, last = part.strip().partition("-")
            ranges.append(range(int(first), int(last if dash else first) + 1))
    except ValueError:
        ranges = []
    # an empty range such as 4-2 is a typing error
    if not ranges or not all(map(len, ranges)):
        raise ValueError(f"{flag} takes numbers such as 0,1,2 or 0-4, got {text!r}")
    if sum(map(len, ranges)) > _MOST_NUMBERS:
        raise ValueError(f"{flag} takes at most {_MOST_NUMBERS} numbers, got {text!r}")
    return tuple(dict.fromkeys(itertools.chain.from_iterable(ranges)))


def _setting_of(flag: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ValueError(f"{flag} takes key=value, got {text!r}")
    return name.strip(), value.strip()
