"""Which runs the study of pretraining is about, and what they left behind.

The plans and the families say which runs belong to it, so that no run is chosen by its outcome. A
family that is not complete is left out: nothing is read from it before its last run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from gfsa_experiments.commands.train import runs_of_plan
from gfsa_experiments.results.families import FOLDER, Family, is_of, read_family
from gfsa_experiments.results.load_rows import read_folder_if_any
from gfsa_experiments.results.pretraining.arms import labelled
from gfsa_experiments.results.pretraining.collect import RUN, TABLES
from gfsa_experiments.results.verdicts import Outcome, outcomes

SCALING = "pretrain-scaling*.txt"
STABILITY = "pretrain-stability.txt"
RATES = "pretrain-controls-rates.txt"
CONTROLS = ("pretrain-controls.txt", "pretrain-layers.txt")
BASELINE = "pretrain-baseline.txt"
WARMUP = "pretrain-warmup.txt"
LONGER_WARMUPS = (
    "pretrain-epoch-tuning.txt",
    "pretrain-epoch-rates.txt",
    "pretrain-epoch-high-rates.txt",
)
LARGER_RATE = "pretrain-46m-rate.txt"
LONG = "pretrain-long.txt"
LONG_WARMUP = "pretrain-long-warmup.txt"
BEST_RATES = "pretrain-epoch-best"
FAMILIES = {
    BEST_RATES: "3.4 tokens a parameter, each arm at its best rate",
    "pretrain-epoch": "3.4 tokens a parameter, every arm at 2e-3",
    "pretrain": "10 tokens a parameter, every arm at 2e-3",
}
"""The length of the runs of each family, in the order of the page."""
_EARLIER_CURVES = Path("tuning/pretrain-curves.csv")


@dataclass(frozen=True)
class Study:
    """The runs, a line each, and their tables; every table has the columns of :data:`RUN`."""

    runs: pd.DataFrame
    """With ``arm``, ``size``, ``parameters`` (of the plain model), ``tokens``, ``ratio`` (tokens
    per parameter), ``batch_size``, and the losses ``test`` and ``valid`` at the end."""
    curves: pd.DataFrame
    """With ``arm``, ``size``, ``step``, ``tokens`` and ``valid loss``."""
    probes: pd.DataFrame
    coefficients: pd.DataFrame
    stability: pd.DataFrame
    """The runs of the plan :data:`STABILITY`, with the columns of ``runs``."""
    missing: list[str]
    """What was asked for and is not there, in sentences."""
    families: Mapping[str, list[Outcome]] = field(default_factory=dict)
    """The comparisons of each of :data:`FAMILIES` that is registered, complete or not."""
    controls: pd.DataFrame = field(default_factory=pd.DataFrame)
    """The runs of :data:`CONTROLS`, with the columns of ``runs``; those of :data:`RATES` and
    :data:`BASELINE` below, with ``lr`` too."""
    rates: pd.DataFrame = field(default_factory=pd.DataFrame)
    baseline: pd.DataFrame = field(default_factory=pd.DataFrame)
    warmups: pd.DataFrame = field(default_factory=pd.DataFrame)
    """The runs of :data:`WARMUP`, and of :data:`LONGER_WARMUPS` those with the same other settings,
    likewise."""
    larger_rates: pd.DataFrame = field(default_factory=pd.DataFrame)
    """The runs of :data:`LARGER_RATE`, likewise."""
    long_warmups: pd.DataFrame = field(default_factory=pd.DataFrame)
    """The runs of :data:`LONG_WARMUP` and, of :data:`LONG`, those that differ from one of them in
    the warm-up alone, likewise."""
    unfinished: frozenset[str] = frozenset()
    """The plans that lack runs, by the names of their files."""

    @property
    def family(self) -> list[Outcome]:
        """The comparisons of the longest runs, which other plans ask questions about."""
        return self.families.get("pretrain", [])


def read_study(folder: Path) -> Study:
    """The study of a folder of results."""
    parts = [read_folder_if_any(place).rows for place in (folder, folder / "tuning")]
    rows = pd.concat(parts, ignore_index=True)
    rows = rows[rows.recipe == "pretrain"]
    plans = _Plans(folder / "plans", rows)
    planned = plans.rows_of(SCALING)
    families = {}
    for name in FAMILIES:
        family = _registered(folder / FOLDER / f"{name}.toml")
        if family is not None:
            with_family, families[name] = _with_family(family, rows, planned, plans.missing)
            # runs that are compared by length have one rate
            planned = planned if name == BEST_RATES else with_family
    # a run may be asked for by two plans
    runs = labelled(planned.drop_duplicates(RUN), plans.missing)
    _refuse_several_data(folder, runs)
    names = [STABILITY, BASELINE, RATES, *CONTROLS, WARMUP, *LONGER_WARMUPS, LARGER_RATE]
    names += [LONG, LONG_WARMUP]
    of_plans = {name: plans.rows_of(name) for name in names}
    controls = pd.concat([of_plans[name] for name in CONTROLS])
    longer = pd.concat([of_plans[name] for name in LONGER_WARMUPS])
    warmups = pd.concat([of_plans[WARMUP], _as_in_families(longer)]).drop_duplicates(RUN)
    long_warmups = of_plans[LONG_WARMUP]
    if len(long_warmups):
        long_warmups = pd.concat([long_warmups, but_for_warmup(of_plans[LONG], long_warmups)])
    tables = {name: _read_table(folder / "pretraining" / f"{name}.csv") for name in TABLES}
    curves = [tables["curves"], _earlier_curves(folder / _EARLIER_CURVES, rows)]
    curve_lines = pd.concat([part for part in curves if len(part)] or curves)
    return Study(
        runs=runs,
        curves=_of_runs(curve_lines, runs).drop_duplicates([*RUN, "step"]),
        probes=_of_runs(tables["probes"], runs),
        coefficients=_of_runs(tables["coefficients"], runs),
        stability=labelled(of_plans[STABILITY], [], keep_diverged=True),
        missing=plans.missing,
        families=families,
        controls=labelled(controls, [], keep_diverged=True),
        rates=labelled(of_plans[RATES], [], keep_diverged=True),
        baseline=labelled(of_plans[BASELINE], [], keep_diverged=True),
        warmups=labelled(warmups, [], keep_diverged=True),
        larger_rates=labelled(of_plans[LARGER_RATE], [], keep_diverged=True),
        long_warmups=labelled(long_warmups, [], keep_diverged=True),
        unfinished=frozenset(plans.unfinished),
    )


def _as_in_families(rows: pd.DataFrame) -> pd.DataFrame:
    """Those of seed 0 with the families' rates of gains and filters and their normalisation."""
    settings = rows.settings.str.contains("gain_lr=0.1 ") & rows.settings.str.contains(
        "qk_norm=temperature"
    )
    return rows[settings & rows.options.isin(["", "filter_lr=0.1"]) & (rows.seed == 0)]


def but_for_warmup(rows: pd.DataFrame, others: pd.DataFrame) -> pd.DataFrame:
    """The rows that differ from one of the others in the warm-up alone."""
    others = others.assign(bare=others.settings.map(_without_warmup))
    keys = set(others[["method", "options", "bare", "seed"]].itertuples(index=False, name=None))
    bare = rows.assign(settings=rows.settings.map(_without_warmup))
    own = bare[["method", "options", "settings", "seed"]].itertuples(index=False, name=None)
    return rows[[key in keys for key in own]]


def _without_warmup(settings: str) -> str:
    return " ".join(word for word in settings.split() if not word.startswith("warmup="))


class _Plans:
    """The rows of the runs that plans ask for; what they lack is noted.

    Args:
        folder: of the plans.
        rows: the rows of all runs.
    """

    def __init__(self, folder: Path, rows: pd.DataFrame) -> None:
        self.folder = folder
        self.rows = rows
        self.missing: list[str] = []
        """In sentences."""
        self.unfinished: set[str] = set()
        """The names of the files of plans that lack runs."""

    def rows_of(self, pattern: str) -> pd.DataFrame:
        """The rows of the plans whose files have such a name; none without such a file."""
        plans = sorted(self.folder.glob(pattern))
        return pd.concat([self.rows[:0], *map(self._rows_of_plan, plans)])

    def _rows_of_plan(self, plan: Path) -> pd.DataFrame:
        keys = {run.key() for run in runs_of_plan(plan)}
        own = self.rows[is_of(self.rows, keys)]
        # before one row of a run is chosen: it would be one on any of them
        _refuse_several_data(plan, own)
        found = own.drop_duplicates(RUN, keep="last")
        if len(found) < len(keys):
            link = f"[{plan.stem}](plans/{plan.name})"
            self.missing.append(
                f"{link}: {len(keys) - len(found)} of {len(keys)} runs are missing."
            )
            self.unfinished.add(plan.name)
        return found


def _registered(path: Path) -> Family | None:
    """The family of a file; None if there is no file, or if it is planned and no more."""
    family = read_family(path) if path.exists() else None
    return None if family is None or family.registered is None else family


def _with_family(
    family: Family, rows: pd.DataFrame, planned: pd.DataFrame, missing: list[str]
) -> tuple[pd.DataFrame, list[Outcome]]:
    """The planned rows with those of the family, if it is complete, and what the family says."""
    own = rows[is_of(rows, family.keys)]
    judged = outcomes(family, own)
    if not all(outcome.is_complete for outcome in judged):
        missing.append(_why_incomplete(family, own))
        return planned, judged
    # fresh seeds alone: of the same length, others chose the family's rates
    lengths = set(zip(own.task, own.steps, strict=True))
    others = [key not in lengths for key in zip(planned.task, planned.steps, strict=True)]
    return pd.concat([planned[others], own]), judged


def _why_incomplete(family: Family, own: pd.DataFrame) -> str:
    if len(own) < len(family.keys):
        return (
            f"The family {family.name} has {len(own)} of its {len(family.keys)} runs; nothing is "
            "read from them before the last."
        )
    return (
        f"The family {family.name} has all its runs, but some pairs do not count: "
        f"`gfsa results --family {family.name}` says why. Nothing is read from them."
    )


def _refuse_several_data(where: Path, rows: pd.DataFrame) -> None:
    data = sorted(set(rows.data) - {""})
    if len(data) > 1:
        raise ValueError(
            f"{where}: the planned runs of pretraining are on different data ({'; '.join(data)}), "
            "which are not compared; remove the rows of one"
        )


def _read_table(path: Path) -> pd.DataFrame:
    if not path.exists():
        return pd.DataFrame(columns=RUN)
    return pd.read_csv(path, keep_default_na=False)


def _earlier_curves(path: Path, rows: pd.DataFrame) -> pd.DataFrame:
    """Curves that were collected without their task, which the rows have."""
    if not path.exists():
        return pd.DataFrame(columns=RUN)
    curves = pd.read_csv(path, keep_default_na=False)
    labels = [name for name in RUN if name != "task"]
    tasks = rows[RUN].drop_duplicates()
    # where two tasks have the same labels, the file does not say which it is
    tasks = tasks[~tasks.duplicated(labels, keep=False)]
    return curves.merge(tasks, on=labels)


def _of_runs(table: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """The lines of these runs, with their arm and size."""
    lines = table.astype({"seed": int})
    return lines.merge(runs[[*RUN, "arm", "size"]], on=RUN)
