"""Families in a line or a table: what is compared, which runs it took, and the verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd

from gfsa_experiments.results.contrasts import IN_NATS, UNIT_OF_NATS, Contrast
from gfsa_experiments.results.families import Family
from gfsa_experiments.results.number_format import (
    Scale,
    contrast_cells,
    decimals_for,
    p_value,
    span,
)
from gfsa_experiments.results.page_blocks import Block, Bullets, Grid, Text
from gfsa_experiments.results.tables import Line
from gfsa_experiments.results.verdicts import Outcome

if TYPE_CHECKING:
    from gfsa_experiments.runs.run import Key

Judged = tuple[Family, list[Outcome]]
_WORDS = ("family", "comparison", "verdict", "at")
PAGE = "families.md"
"""Beside the first page: families line by line."""
_DETAILS = ("on valid", "at")
"""Columns that the first page leaves to :data:`PAGE`."""
NAMES = {"gfsa": "GFSA", "degree1": "degree 1", "gain": "gain only", "gated": "gated heads"}
NAMES |= {"longer": "longer plain", "residual": "value residual"}
NAMES |= {"both": "degree 1 on gated heads", "featscale": "FeatScale", "w0": "identity term"}
"""How prose and figures name the lines of families; any other line goes by its own name."""


@dataclass(frozen=True, eq=False)
class FamilyLine:
    """A line as the family's file names it, with its runs."""

    name: str
    keys: tuple[Key, ...]
    """Those of its runs, in the order of the seeds."""
    metric: str
    line: Line

    @property
    def key(self) -> Key:
        """That of its first run."""
        return self.keys[0]

    @property
    def task(self) -> tuple[str, str]:
        """Recipe and task."""
        return self.key[:2]


def all_families(judged: Sequence[Judged]) -> list[Block]:
    """Which families are complete, which lack runs or have none, and a table of all comparisons."""
    complete = [
        f"{link(family)} ({family.title})" for family, outcomes in judged if is_complete(outcomes)
    ]
    said = []
    if complete:
        said.append(
            f"Complete, each registered before its runs: {', '.join(complete)}. On valid, at equal "
            f"time or not, seed by seed: [families]({PAGE})."
        )
    said += [
        summary(family, outcomes)
        for family, outcomes in judged
        if _has_runs(outcomes) and not is_complete(outcomes)
    ]
    planned = [
        f"{link(family)} ({_count(outcomes)}, {_seeds(outcomes)} seeds)"
        for family, outcomes in judged
        if not _has_runs(outcomes) and not family.withdrawn
    ]
    withdrawn = [link(family) for family, _ in judged if family.withdrawn]
    later = [f"Planned, not run: {', '.join(planned)}."] if planned else []
    if withdrawn:
        later.append(f"Withdrawn before any run, [with reasons]({PAGE}): {', '.join(withdrawn)}.")
    if later:
        said.append(" ".join(later))
    said += _unit_note(judged)
    blocks: list[Block] = [Bullets(said)] if said else []
    if not any(is_complete(outcomes) for _, outcomes in judged):
        blocks.insert(0, Text("No family is complete yet, so nothing is called better or worse."))
    rows = [
        {"family": family.name}
        | {name: cell for name, cell in _cells(outcome).items() if name not in _DETAILS}
        for family, outcomes in judged
        if _has_table(outcomes)
        for outcome in outcomes
    ]
    return [*blocks, _grid(rows)] if rows else blocks


def _unit_note(judged: Sequence[Judged]) -> list[str]:
    contrasts = [outcome.contrast for _, outcomes in judged for outcome in outcomes]
    in_nats = any(found is not None and found.metric in IN_NATS for found in contrasts)
    return [f"*error reduction*: {UNIT_OF_NATS}."] if in_nats else []


def family_blocks(family: Family, outcomes: Sequence[Outcome]) -> list[Block]:
    """One family by itself; without any row it takes one sentence."""
    said = Text(summary(family, outcomes))
    return [said, _grid([_cells(found) for found in outcomes])] if _has_runs(outcomes) else [said]


def of_recipe(judged: Sequence[Judged], recipe: str) -> list[Block]:
    """The families of a recipe on its own page: planned, lacking runs, or with their verdicts."""
    said = []
    for family, outcomes in judged:
        if recipe not in {own for o in outcomes for own, _ in o.comparison.tasks}:
            continue
        if is_complete(outcomes):
            verdicts = "; ".join(f"{o.comparison.name}: {o.verdict}" for o in outcomes)
            said.append(f"Family {link(family)}, {state(family)}: {verdicts}.")
        else:
            said.append(f"Family {summary(family, outcomes)}")
    return [Text(f"{' '.join(said)} Families: [{PAGE}]({PAGE}).")] if said else []


def summary(family: Family, outcomes: Sequence[Outcome]) -> str:
    """What is compared on what, and the runs it took or lacks."""
    metrics = ", ".join(dict.fromkeys(outcome.comparison.metric for outcome in outcomes))
    head = f"{link(family)}: {family.title}, {metrics}, {state(family)}"
    if is_complete(outcomes):
        return f"{head}; {runs_of(outcomes)}."
    names = "; ".join(outcome.comparison.name for outcome in outcomes)
    head = f"{head}, {_count(outcomes)} ({names}), {_seeds(outcomes)} seeds"
    if family.withdrawn:
        return f"{head}, withdrawn before any run: {family.withdrawn}."
    if not _has_runs(outcomes):
        return f"{head}, not run."
    if any(outcome.unusable for outcome in outcomes):
        return f"{head}, pairs that do not count: no verdict."
    missing = span(outcome.missing for outcome in outcomes)
    return f"{head}, {missing} of {_seeds(outcomes)} pairs missing: no verdict."


def runs_of(outcomes: Sequence[Outcome]) -> str:
    """``36 runs at commit e5f14d8, 73.5–82.5 GPU seconds each``"""
    lines = [own.line for own in lines_of(outcomes)]
    count = sum(len(line.rows) + len(line.failed) for line in lines)
    seconds = [line.gpu_seconds for line in lines if line.gpu_seconds is not None]
    cost = f", {span(seconds, digits=3)} GPU seconds each" if seconds else ""
    return f"{count} runs {_at_commits(lines)}{cost}"


def lines_of(outcomes: Iterable[Outcome]) -> list[FamilyLine]:
    """Every line of a complete family once, in the order of the comparisons."""
    found: dict[tuple[object, ...], FamilyLine] = {}
    for outcome in outcomes:
        for name, line in outcome.lines.items():
            keys = tuple(outcome.comparison.keys(name))
            one = FamilyLine(name, keys, outcome.comparison.metric, line)
            # two comparisons may give one name settings of their own
            found.setdefault((name, *keys), one)
    return list(found.values())


def _at_commits(lines: Sequence[Line]) -> str:
    """A pair of two commits would not count, so commits can only differ between pairs."""
    commits = list(dict.fromkeys(commit for line in lines for commit in line.rows.commit))
    if len(commits) > 1:
        return f"at commits {', '.join(commits)} (each pair at one)"
    return f"at commit {commits[0]}" if commits else "without a commit"


def contrast_scale(found: Contrast | None) -> Scale:
    """Digits for the spread over pairs."""
    spread = None if found is None else pd.Series(found.test.values).std()
    return Scale(1, decimals_for(spread, 0.0 if found is None else found.error))


def _cells(outcome: Outcome) -> dict[str, str]:
    cells = contrast_cells(outcome.contrast, contrast_scale(outcome.contrast))
    return {
        "comparison": outcome.comparison.name,
        "pairs": str(outcome.pairs),
        **{name: cells[name] for name in ("difference", "on valid", "error reduction")},
        "p (Holm)": p_value(outcome.p_holm),
        "verdict": outcome.verdict,
        "at": cells["at"],
    }


def _grid(rows: Sequence[dict[str, str]]) -> Grid:
    return Grid(list(rows[0]), [list(row.values()) for row in rows], _WORDS)


def is_complete(outcomes: Sequence[Outcome]) -> bool:
    return all(outcome.is_complete for outcome in outcomes)


def _has_runs(outcomes: Sequence[Outcome]) -> bool:
    return any(outcome.missing < len(outcome.comparison.seeds) for outcome in outcomes)


def _has_table(outcomes: Sequence[Outcome]) -> bool:
    """A family that lacks runs has nothing to show; why pairs do not count, the table says."""
    return is_complete(outcomes) or any(outcome.unusable for outcome in outcomes)


def _count(outcomes: Sequence[Outcome]) -> str:
    return f"{len(outcomes)} comparison{'s' if len(outcomes) > 1 else ''}"


def _seeds(outcomes: Sequence[Outcome]) -> str:
    return span(len(outcome.comparison.seeds) for outcome in outcomes)


def link(family: Family) -> str:
    return f"[{family.name}](families/{family.path.name})"


def state(family: Family) -> str:
    return "planned" if family.registered is None else f"registered {family.registered:%Y-%m-%d}"
