"""Which runs the study of pretraining is about, and what they left behind.

The plans and the family say which runs belong to it, so that no run is chosen by its outcome. A
family that is not complete is left out: nothing is read from it before its last run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from gfsa_experiments.commands.train import runs_of_plan
from gfsa_experiments.results.families import FOLDER, is_of, read_family
from gfsa_experiments.results.load_rows import read_folder_if_any
from gfsa_experiments.results.pretraining.collect import RUN, TABLES
from gfsa_experiments.results.verdicts import Outcome, outcomes
from gfsa_experiments.tasks.pretrain.recipe import PretrainConfig

SCALING = "pretrain-scaling*.txt"
STABILITY = "pretrain-stability.txt"
RATES = "pretrain-controls-rates.txt"
CONTROLS = ("pretrain-controls.txt", "pretrain-layers.txt")
BASELINE = "pretrain-baseline.txt"
FAMILY = "pretrain"
PLAIN = "plain"
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
    family: list[Outcome] = field(default_factory=list)
    """The family's comparisons, complete or not; none without the family's file."""
    controls: pd.DataFrame = field(default_factory=pd.DataFrame)
    """The runs of :data:`CONTROLS`, with the columns of ``runs``; those of :data:`RATES` and
    :data:`BASELINE` below, with ``lr`` too."""
    rates: pd.DataFrame = field(default_factory=pd.DataFrame)
    baseline: pd.DataFrame = field(default_factory=pd.DataFrame)
    unfinished: frozenset[str] = frozenset()
    """The plans that lack runs, by the names of their files."""


def read_study(folder: Path) -> Study:
    """The study of a folder of results."""
    parts = [read_folder_if_any(place).rows for place in (folder, folder / "tuning")]
    rows = pd.concat(parts, ignore_index=True)
    rows = rows[rows.recipe == "pretrain"]
    missing: list[str] = []
    unfinished: set[str] = set()

    def planned_by(plan: Path) -> pd.DataFrame:
        found, count = _planned(rows, plan)
        if len(found) < count:
            link = f"[{plan.stem}](plans/{plan.name})"
            missing.append(f"{link}: {count - len(found)} of {count} runs are missing.")
            unfinished.add(plan.name)
        return found

    plans = sorted((folder / "plans").glob(SCALING))
    planned = pd.concat([rows[:0], *map(planned_by, plans)])
    judged: list[Outcome] = []
    path = folder / FOLDER / f"{FAMILY}.toml"
    if path.exists():
        family = read_family(path)
        own = rows[is_of(rows, family.keys)]
        judged = outcomes(family, own)
        if all(outcome.is_complete for outcome in judged):
            # fresh seeds alone: of the same length, others chose the family's rates
            lengths = set(zip(own.task, own.steps, strict=True))
            others = [key not in lengths for key in zip(planned.task, planned.steps, strict=True)]
            planned = pd.concat([planned[others], own])
        elif len(own) < len(family.keys):
            missing.append(
                f"The family {FAMILY} has {len(own)} of its {len(family.keys)} runs; nothing is "
                "read from them before the last."
            )
        else:
            missing.append(
                f"The family {FAMILY} has all its runs, but some pairs do not count: "
                f"`gfsa results --family {FAMILY}` says why. Nothing is read from them."
            )
    # a run may be asked for by two plans
    runs = labelled(planned.drop_duplicates(RUN), missing)
    _refuse_several_data(folder, runs)
    plan = folder / "plans" / STABILITY
    stability = planned_by(plan) if plan.exists() else rows[:0]
    of_plans = {
        name: planned_by(folder / "plans" / name)
        for name in (BASELINE, RATES, *CONTROLS)
        if (folder / "plans" / name).exists()
    }
    controls = [of_plans[name] for name in CONTROLS if name in of_plans]
    tables = {name: _read_table(folder / "pretraining" / f"{name}.csv") for name in TABLES}
    curves = [tables["curves"], _earlier_curves(folder / _EARLIER_CURVES, rows)]
    curve_lines = pd.concat([part for part in curves if len(part)] or curves)
    return Study(
        runs,
        _of_runs(curve_lines, runs).drop_duplicates([*RUN, "step"]),
        _of_runs(tables["probes"], runs),
        _of_runs(tables["coefficients"], runs),
        labelled(stability, [], keep_diverged=True),
        missing,
        judged,
        labelled(pd.concat([rows[:0], *controls]), [], keep_diverged=True),
        labelled(of_plans.get(RATES, rows[:0]), [], keep_diverged=True),
        labelled(of_plans.get(BASELINE, rows[:0]), [], keep_diverged=True),
        frozenset(unfinished),
    )


def _planned(rows: pd.DataFrame, plan: Path) -> tuple[pd.DataFrame, int]:
    """The rows of a plan's runs, and how many runs it asks for."""
    keys = {run.key() for run in runs_of_plan(plan)}
    own = rows[is_of(rows, keys)]
    # before one row of a run is chosen: it would be one on any of them
    _refuse_several_data(plan, own)
    return own.drop_duplicates(RUN, keep="last"), len(keys)


def _refuse_several_data(where: Path, rows: pd.DataFrame) -> None:
    data = sorted(set(rows.data) - {""})
    if len(data) > 1:
        raise ValueError(
            f"{where}: the planned runs of pretraining are on different data ({'; '.join(data)}), "
            "which are not compared; remove the rows of one"
        )


def labelled(rows: pd.DataFrame, missing: list[str], keep_diverged: bool = False) -> pd.DataFrame:
    """Rows with their arm, size and tokens; a run without a finite loss is named and left out."""
    runs = rows.copy()
    texts = zip(runs.method, runs.options, runs.settings, strict=True)
    runs["arm"] = [arm_of(*text) for text in texts]
    runs["size"] = [task.rpartition("-")[2].upper() for task in runs.task]
    words = [_words(text) for text in runs.settings]
    runs["batch_size"] = [int(w.get("batch_size", PretrainConfig.batch_size)) for w in words]
    runs["lr"] = [float(w.get("lr", PretrainConfig.lr)) for w in words]
    block = [int(w.get("block", PretrainConfig.block)) for w in words]
    runs["tokens"] = runs.steps.astype(int) * runs.batch_size * block
    runs["parameters"] = runs.parameters - runs.added
    runs["ratio"] = runs.tokens / runs.parameters
    if keep_diverged:
        return runs
    for row in runs[runs.test.isna()].itertuples():
        missing.append(f"{row.size} {row.arm}, seed {row.seed}: the run diverged and is left out.")
    runs = runs[runs.test.notna()]
    twice = runs[runs.duplicated(["arm", "size", "tokens", "seed"], keep=False)]
    if len(twice):
        names = "; ".join(f"{row.arm} {row.settings}" for row in twice.itertuples())
        raise ValueError(
            f"{twice['size'].iloc[0]}, seed {twice.seed.iloc[0]}: two runs of one arm see as many "
            f"tokens: {names}; the plans must ask for one"
        )
    return runs


def arm_of(method: str, options: str, settings: str) -> str:
    """The name of what a run tries, whatever its rates, length and size."""
    own, of_model = _words(options), _words(settings)
    names = {"plain": PLAIN, "degree1": "degree 1", "gfsa": "GFSA", "neutreno": "value residual"}
    name = names.get(method, method)
    if own.get("learn") == "w1":
        name = "gain only"
    if of_model.get("gate") == "True":
        name = "gated" if name == PLAIN else f"{name}, gated"
    if "depth" in of_model:
        name += f", {of_model['depth']} layers"
    if "layers" in own:
        name += f", {own['layers']} layers"
    if "init_std" in of_model:
        name += f", weights of {of_model['init_std']}"
    if of_model.get("output_norm") == "True":
        name += ", normalised outputs"
    return name


def settings_apart(texts: Iterable[str]) -> dict[str, str]:
    """The settings of several runs → those of them that not all of the runs have."""
    words = {text: text.split() for text in texts}
    for own in words.values():
        # the default, which settings do not name
        if not any(word.startswith("qk_norm=") for word in own):
            own.append(f"qk_norm={PretrainConfig.qk_norm}")
    shared = set[str].intersection(*map(set, words.values())) if words else set()
    return {
        text: " ".join(word for word in own if word not in shared) for text, own in words.items()
    }


def _words(text: str) -> dict[str, str]:
    return dict(word.partition("=")[::2] for word in text.split())


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


def speeds_of(times: pd.DataFrame) -> dict[tuple[str, str, int], float]:
    """Tokens per second of rows that had the GPU to themselves, by size, arm and batch size."""
    alone = labelled(times[(times.recipe == "pretrain") & (times.jobs == 1)], [], True)
    found: dict[tuple[str, str, int], float] = {}
    for row in alone.itertuples():
        speed = _words(str(row.others)).get("tokens_per_second")
        if speed is not None and "residual=" not in str(row.settings):
            found[str(row.size), str(row.arm), int(str(row.batch_size))] = float(speed)
    return found


def read_speeds(folder: Path) -> dict[tuple[str, str, int], float]:
    """The same from ``times`` in a folder of results."""
    return speeds_of(read_folder_if_any(folder / "times").rows)


def speed_at(
    speeds: Mapping[tuple[str, str, int], float], size: str, arm: str, batch_size: int
) -> tuple[float, int] | None:
    """Tokens per second and the batch size they were measured at: this one, or the nearest."""
    measured = sorted(
        (abs(batch - batch_size), batch)
        for (of_size, of_arm, batch) in speeds
        if (of_size, of_arm) == (size, arm)
    )
    if not measured:
        return None
    batch = measured[0][1]
    return speeds[size, arm, batch], batch


def by_size(runs: pd.DataFrame) -> list[str]:
    """The sizes, smallest first."""
    order = runs.groupby("size").parameters.min().sort_values()
    return [str(size) for size in order.index]


def arms_of(runs: pd.DataFrame) -> list[str]:
    """The arms: plain, degree 1 and GFSA first, then the others by name."""
    known = [PLAIN, "degree 1", "GFSA"]
    found: Iterable[Any] = runs.arm.unique()
    return sorted(map(str, found), key=lambda arm: (known.index(arm) if arm in known else 9, arm))
