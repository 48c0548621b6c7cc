"""What rows say, as blocks of a page: verdicts of families, tables, domains, tuning, costs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import pandas as pd

from gfsa.lens.readings import csv_cell
from gfsa_experiments.results.families import (
    Family,
    FamilyLine,
    Judged,
    Outcome,
    is_complete,
    lines_of,
)
from gfsa_experiments.results.pages import (
    NONE,
    Block,
    Bullets,
    Commands,
    Grid,
    Heading,
    Text,
    contrast_cells,
    decimals_for,
    decimals_of_contrast,
    decimals_of_lines,
    number,
    p_value,
    percent,
    ratio,
    signed,
    span,
)
from gfsa_experiments.results.statistics import LEVEL, Contrast, contrast, pooled_reduction
from gfsa_experiments.results.tables import (
    DEGREE_1,
    PLAIN,
    Line,
    ResultTable,
    coefficients_of,
    learns_c0,
    titles,
)

DOMAINS = {
    "pretrain": "pretraining",
    "causal_lm": "language modelling",
    "image": "images",
    "graph": "graphs",
    "speech": "speech",
    "lra": "long sequences",
    "code": "code",
    "glue": "GLUE, fine-tuned",
    "digits": "digits",
}
FILTERS = {DEGREE_1: "degree 1", "gfsa": "GFSA"}
NAMES = FILTERS | {
    "gain": "gain only",
    "gated": "gated heads",
    "longer": "longer plain",
    "residual": "value residual",
    "pretrain-epoch-best/both": "degree 1 on gated heads",
    "pretrain-lasting/both": "exclusive + depth",
    "featscale": "FeatScale",
    "w0": "identity term",
}
"""How tables and figures name the lines of families; any other line goes by its own name."""
# where a method ran with several options, a domain counts this choice, whatever its outcome
OWN_RATE = "filter_lr=0.01"
_FROM_SCRATCH = ("pretrain", "image", "graph", "speech", "lra", "stdlib", "digits")


def named(comparison: str, family: str = "") -> str:
    """``gfsa − plain`` in the words of pages, ``GFSA − plain``; a family may have its own."""
    lines = comparison.split(" − ")
    return " − ".join(NAMES.get(f"{family}/{line}", NAMES.get(line, line)) for line in lines)


# families


def verdicts(judged: Sequence[Judged]) -> list[Block]:
    """Every comparison of the complete families, and what the others lack."""
    rows, said = [], []
    for family, outcomes in judged:
        if not is_complete(outcomes) and not any(outcome.unusable for outcome in outcomes):
            said.append(summary(family, outcomes))
            continue
        for first, outcome in enumerate(outcomes):
            cells = contrast_cells(outcome.contrast, decimals_of_contrast(outcome.contrast))
            row = {
                "setting": "" if first else f"{_link(family)}: {family.title}",
                "comparison": named(outcome.comparison.name, family.name),
                "pairs": str(outcome.pairs),
                **{name: cells[name] for name in ("difference", "error reduction")},
                "p (Holm)": p_value(outcome.p_holm),
                "verdict": outcome.verdict,
            }
            rows.append(row)
    blocks: list[Block] = [Grid(rows, ("setting", "comparison", "verdict"))] if rows else []
    return [*blocks, Bullets(said)] if said else blocks


def score_blocks(judged: Sequence[Judged]) -> list[Block]:
    """One row per complete family, for a first page: both scores, and the answer at equal time.

    The row is about the line that is compared with one named ``longer …``, plain for as long as the
    other trained, or else about the first line that is compared with plain.
    """
    rows = []
    for family, outcomes in judged:
        lines = {own.name: own.line for own in lines_of(outcomes)}
        longer = [o for o in outcomes if o.comparison.b.startswith("longer") and o.contrast]
        leads = [*longer, *(o for o in outcomes if o.comparison.b == PLAIN[0] and o.contrast)]
        if not leads or PLAIN[0] not in lines:
            continue
        name, metric = leads[0].comparison.a, leads[0].comparison.metric
        own, plain = lines[name], lines[PLAIN[0]]
        registered = [o for o in leads if (o.comparison.a, o.comparison.b) == (name, PLAIN[0])]
        verdict = registered[0].verdict if registered else "exploratory"
        decimals = decimals_of_lines([own, plain])
        row = {
            "setting": f"[{family.title.partition(':')[0]}](families/{family.path.name}), {metric}",
            "plain": number(plain.mean, decimals),
            "filtered": f"{number(own.mean, decimals)} ({named(name, family.name)})",
            "difference": _short(contrast(own.rows, plain.rows), verdict),
            "seeds": str(len(own.rows)),
            "at equal time": _short(longer[0].contrast, longer[0].verdict) if longer else "not run",
        }
        rows.append(row)
    return [Grid(rows, ("setting", "difference", "at equal time"))] if rows else []


def _short(found: Contrast | None, verdict: str) -> str:
    """``−1.49, better``"""
    mean = None if found is None else found.test.mean
    return f"{signed(mean, decimals_of_contrast(found))}, {verdict}"


def summary(family: Family, outcomes: Sequence[Outcome]) -> str:
    """What is compared on what, and the runs it took or lacks."""
    metrics = ", ".join(dict.fromkeys(outcome.comparison.metric for outcome in outcomes))
    if family.withdrawn:
        return f"{_link(family)}: {family.title}; withdrawn before any run: {family.withdrawn}."
    state = "planned"
    if family.registered is not None:
        state = f"registered {family.registered:%Y-%m-%d}"
    head = f"{_link(family)}: {family.title}, {metrics}, {state}"
    if is_complete(outcomes):
        return f"{head}; {_runs_of(outcomes)}."
    names = "; ".join(outcome.comparison.name for outcome in outcomes)
    seeds = span(len(outcome.comparison.seeds) for outcome in outcomes)
    head = f"{head}, {names}, {seeds} seeds"
    if not _has_runs(outcomes):
        return f"{head}, not run."
    if any(outcome.unusable for outcome in outcomes):
        return f"{head}, pairs that do not count: no verdict."
    missing = span(outcome.missing for outcome in outcomes)
    return f"{head}, {missing} of {seeds} pairs missing: no verdict."


def family_section(family: Family, outcomes: Sequence[Outcome]) -> list[Block]:
    """One family: its comparisons, its lines, each seed; before its last run what it lacks."""
    head: list[Block] = [Heading(family.name), Text(summary(family, outcomes))]
    if not _has_runs(outcomes):
        commands = [] if family.withdrawn else [Commands(_commands(family))]
        return [*head, *commands]
    head.append(Grid([_comparison_cells(found) for found in outcomes], _WORDS))
    if not is_complete(outcomes):
        return [*head, Commands(_commands(family))]
    lines = lines_of(outcomes)
    every = [own.keys[0].settings.split() for own in lines]
    shared = [word for word in every[0] if all(word in words for words in every)]
    if shared:
        head.append(Text(f"Every line has `{' '.join(shared)}`, others by default."))
    head.append(
        Grid([_line_cells(own, lines, shared) for own in lines], ("line", "runs", "commit"))
    )
    return [*head, Bullets([_by_seed(outcome) for outcome in outcomes])]


_WORDS = ("comparison", "metric", "verdict", "at")


def _comparison_cells(outcome: Outcome) -> dict[str, str]:
    cells = contrast_cells(outcome.contrast, decimals_of_contrast(outcome.contrast))
    return {
        "comparison": outcome.comparison.name,
        "metric": outcome.comparison.metric,
        "pairs": str(outcome.pairs),
        **{n: cells[n] for n in ("difference", "on valid", "better", "error reduction", "p")},
        "p (Holm)": p_value(outcome.p_holm),
        "verdict": outcome.verdict,
        "at": cells["at"],
    }


def _line_cells(
    own: FamilyLine, lines: Sequence[FamilyLine], shared: Sequence[str]
) -> dict[str, str]:
    line = own.line
    alike = [other for other in lines if other.metric == own.metric]
    decimals = decimals_of_lines([other.line for other in alike])
    words = [word for word in own.keys[0].settings.split() if word not in shared]
    c0, seconds = line.c0, line.gpu_seconds
    return {
        "line": own.name,
        "runs": f"`{' '.join([line.name, *words])}`",
        "seeds": _seeds_of(line),
        "test": _mean_cell(line, decimals),
        "valid": number(line.valid, decimals),
        "to plain": _difference_to(PLAIN[0], own, alike, decimals),
        "to degree 1": _difference_to(DEGREE_1, own, alike, decimals),
        "c0 c1 …": _coefficients_cell(line),
        "c0 < 0": f"{sum(value < 0 for value in c0)}/{len(c0)}" if c0 else NONE,
        "GPU seconds": NONE if seconds is None else f"{seconds:.3g}",
        "commit": ", ".join(dict.fromkeys(line.rows.commit)) or NONE,
    }


def _difference_to(name: str, own: FamilyLine, lines: Sequence[FamilyLine], decimals: int) -> str:
    """To the one line of this name on the same task."""
    found = [line for line in lines if line.name == name and line.task == own.task]
    if len(found) != 1 or found[0] is own:
        return NONE
    return contrast_cells(contrast(own.line.rows, found[0].line.rows), decimals)["difference"]


def _by_seed(outcome: Outcome) -> str:
    if outcome.contrast is None:
        return f"{outcome.comparison.name}: {outcome.verdict}."
    test, decimals = outcome.contrast.test, decimals_of_contrast(outcome.contrast)
    values = ", ".join(
        f"{s}: {signed(v, decimals)}" for s, v in zip(test.seeds, test.values, strict=True)
    )
    return f"{outcome.comparison.name} by seed: {values}"


def _runs_of(outcomes: Sequence[Outcome]) -> str:
    """``36 runs at commit e5f14d8, 73.5–82.5 GPU seconds each``"""
    lines = [own.line for own in lines_of(outcomes)]
    count = sum(len(line.rows) + len(line.failed) for line in lines)
    seconds = [line.gpu_seconds for line in lines if line.gpu_seconds is not None]
    commits = list(dict.fromkeys(commit for line in lines for commit in line.rows.commit))
    # a pair of two commits would not count, so commits can only differ between pairs
    at = f" at commit {', '.join(commits)}" if commits else ""
    return f"{count} runs{at}" + (f", {span(seconds, 3)} GPU seconds each" if seconds else "")


def _commands(family: Family) -> list[str]:
    return [f"gfsa train {arguments}" for arguments in family.plan]


def _has_runs(outcomes: Sequence[Outcome]) -> bool:
    return any(outcome.missing < len(outcome.comparison.seeds) for outcome in outcomes)


def _link(family: Family) -> str:
    return f"[{family.name}](families/{family.path.name})"


# exploratory tables


def table_blocks(tables: Sequence[ResultTable]) -> list[Block]:
    """All lines of all tables, and notes on what is missing, failed or repeated."""
    rows, notes = [], []
    for table, title in zip(tables, titles(tables), strict=True):
        decimals = decimals_of_lines(table.lines)
        arrow = "" if table.higher_is_better else " ↓"
        for first, line in enumerate(table.lines):
            found = contrast_cells(line.to_plain, decimals)
            row = {
                "task": "" if first else f"{table.recipe}: {title}, {table.metric}{arrow}",
                "method": line.name,
                "seeds": _seeds_of(line),
                "test": _mean_cell(line, decimals),
                "difference to plain": found["difference"],
                "exploratory": found["reading"],
                "c0 c1 …": _coefficients_cell(line),
            }
            rows.append(row)
        notes += [f"{title}: {note}" for note in notes_of(table)]
    blocks: list[Block] = [Grid(rows, ("task", "method", "exploratory"))] if rows else []
    return [*blocks, Bullets(notes)] if notes else blocks


def records(tables: Sequence[ResultTable]) -> pd.DataFrame:
    """The lines of all tables with unrounded numbers, for ``--csv``."""
    found = []
    for table in tables:
        for line in table.lines:
            compared, second = line.to_plain, line.to_degree1
            test = None if compared is None else compared.test
            record = {
                "recipe": table.recipe,
                "task": table.task,
                "settings": table.settings,
                "data": " ".join(sorted(set(line.rows.data) - {""})),
                "metric": table.metric,
                "higher_is_better": table.higher_is_better,
                "method": line.method,
                "options": line.options,
                "seeds": len(line.rows),
                "failed": len(line.failed),
                "mean": line.mean,
                "std": line.std,
                "valid": line.valid,
                "difference": test and test.mean,
                "low": test and test.low,
                "high": test and test.high,
                "p": test and test.p,
                "p_holm": line.adjusted_p,
                "reading": test and test.reading,
                "difference_on_valid": compared and compared.valid and compared.valid.mean,
                "one_commit": compared and compared.one_commit,
                "difference_to_degree1": second and second.test.mean,
                "added": max(line.added, default=None),
                "moved": line.moved,
                "coefficients": " ".join(f"{c:.6g}" for c in line.coefficients or ()),
                "time_ratio": " ".join(f"{time:.4g}" for time in line.times),
                "memory_ratio": " ".join(f"{memory:.4g}" for memory in line.memories),
                "gpu_seconds": line.gpu_seconds,
            }
            found.append(
                {name: csv_cell(x) if isinstance(x, str) else x for name, x in record.items()}
            )
    return pd.DataFrame(found, dtype=object)


def _mean_cell(line: Line, decimals: int) -> str:
    spread = "" if line.std is None else f" ± {number(line.std, decimals)}"
    return number(line.mean, decimals) + spread


def _coefficients_cell(line: Line) -> str:
    return " ".join(number(c, 3) for c in line.coefficients or ()) or NONE


def _seeds_of(line: Line) -> str:
    failed = f", failed: {_seeds(line.failed)}" if line.failed else ""
    return f"{len(line.rows)}{failed}"


def notes_of(table: ResultTable) -> list[str]:
    """The notes of one table: its data, and missing, failed, repeated and single seeds."""
    notes = _of_data(table)
    plain = table.plain
    if plain is None:
        notes.append("no run of plain with these settings, so no difference.")
    for line in table.lines:
        notes.extend(_of_line(line, plain))
    for (method, options), count in table.replaced.value_counts(["method", "options"]).items():
        rows = "row was" if count == 1 else "rows were"
        name = f"{method} {options}".strip()
        notes.append(f"{name}: {count} {rows} replaced by a later run of the same seed.")
    return notes


def _of_data(table: ResultTable) -> list[str]:
    """The data of the rows, if it is not the same for all."""
    without_data = int((table.rows.data == "").sum())
    if table.data:
        return [f"compared with runs on the same data alone, {table.data}."]
    if table.data == "":
        return ["these rows do not name their data, and others are on several: not compared."]
    if 0 < without_data < len(table.rows):
        return [
            f"{without_data} of {len(table.rows)} rows do not name their data; they are taken to "
            "be on that of the others."
        ]
    return []


def _of_line(line: Line, plain: Line | None) -> list[str]:
    notes = []
    if line.failed:
        notes.append(
            f"{line.name}: {_seeds(line.failed)} ended without a finite number; this counts in no "
            "mean and no difference, and speaks against the method."
        )
    if plain is None or line is plain:
        return notes
    ours, theirs = set(line.values), set(plain.values)
    if not ours & theirs:
        return [*notes, f"{line.name}: has no seed in common with plain, so no difference."]
    if ours != theirs:
        alone = [f"{_seeds(ours - theirs)} ran without plain"] if ours - theirs else []
        alone += [f"plain alone has {_seeds(theirs - ours)}"] if theirs - ours else []
        notes.append(
            f"{line.name}: {' and '.join(alone)}; the difference is over {_seeds(ours & theirs)}."
        )
    if line.difference is not None and line.difference.low is None:
        why = "one seed" if len(line.difference.seeds) == 1 else "the same difference on every seed"
        notes.append(f"{line.name}: {why}, so no interval.")
    return notes


def _seeds(numbers: Iterable[int]) -> str:
    """``seed 3``, ``seeds 0, 1, 2``"""
    ordered = sorted(numbers)
    return f"{'seed' if len(ordered) == 1 else 'seeds'} {', '.join(map(str, ordered))}"


# domains and costs


@dataclass(frozen=True)
class Domain:
    """The tables of one recipe; each task counts the same, and none is chosen."""

    name: str
    to_plain: dict[str, list[Contrast]]
    """By method, one contrast per table."""
    second_pass: list[Contrast]
    """GFSA to degree 1."""


def domains(tables: Sequence[ResultTable]) -> list[Domain]:
    """Every domain in which a filter (without filters: any method) can be compared with plain."""
    every = dict.fromkeys(line.method for table in tables for line in table.lines)
    methods = [name for name in FILTERS if name in every] or [n for n in every if n != "plain"]
    order = list(DOMAINS)
    by_recipe = {recipe: list(own) for recipe, own in groupby(tables, key=lambda t: t.recipe)}
    recipes = sorted(by_recipe, key=lambda r: (order.index(r) if r in order else len(order), r))
    found = [_domain(recipe, by_recipe[recipe], methods) for recipe in recipes]
    return [domain for domain in found if any(domain.to_plain.values())]


def _domain(recipe: str, tables: Sequence[ResultTable], methods: Sequence[str]) -> Domain:
    lines = {
        name: [line for table in tables if (line := headline(table, name)) is not None]
        for name in methods
    }
    to_plain = {
        name: [line.to_plain for line in own if line.to_plain is not None]
        for name, own in lines.items()
    }
    second = [line.to_degree1 for line in lines.get("gfsa", []) if line.to_degree1]
    return Domain(DOMAINS.get(recipe, recipe), to_plain, second)


def headline(table: ResultTable, method: str) -> Line | None:
    """A method's only line; of several that with :data:`OWN_RATE`, never the best."""
    lines = [line for line in table.lines if line.method == method]
    return next((line for line in lines if len(lines) == 1 or line.options == OWN_RATE), None)


def domain_blocks(tables: Sequence[ResultTable]) -> list[Block]:
    """The relative error reduction of each domain, and what is regular over all runs."""
    rows = [_domain_cells(domain) for domain in domains(tables)]
    blocks: list[Block] = [Grid(rows, ("domain",))] if rows else []
    notes = [*_coefficient_note(tables), *_chance_note(tables)]
    return [*blocks, Bullets(notes)] if notes else blocks


def _domain_cells(domain: Domain) -> dict[str, str]:
    compared = {FILTERS.get(name, name): found for name, found in domain.to_plain.items()}
    compared["GFSA to degree 1"] = domain.second_pass
    pairs = [len(found.test.seeds) for contrasts in compared.values() for found in contrasts]
    cells = {
        "domain": domain.name,
        "tasks": span(len(contrasts) for contrasts in compared.values() if contrasts),
        "pairs": span(pairs),
    }
    for name, contrasts in compared.items():
        found = pooled_reduction(contrasts)
        word = ", suggestive" if found is not None and found.excludes_zero else ""
        cells[name] = percent(found) + word
    return cells


def _coefficient_note(tables: Sequence[ResultTable]) -> list[str]:
    rows = [row for table in tables for row in table.rows.itertuples() if learns_c0(row)]
    scratch = [
        coefficients_of(row)[0]
        for row in rows
        if row.recipe in _FROM_SCRATCH or "model=scratch" in row.command
    ]
    if not scratch:
        return []
    negative = sum(c0 < 0 for c0 in scratch)
    return [f"The mean of c0 is negative in {negative} of {len(scratch)} runs from scratch."]


def _chance_note(tables: Sequence[ResultTable]) -> list[str]:
    lines = [line for table in tables for line in table.lines]
    readings = [line.difference.reading for line in lines if line.difference is not None]
    known = [reading for reading in readings if reading is not None]
    # of one comparison there is nothing to correct
    if len(known) < 2:
        return []
    excluding = sum(reading != "not shown" for reading in known)
    kept = sum(line.adjusted_p is not None and line.adjusted_p < 1 - LEVEL for line in lines)
    return [
        f"Of {len(known)} exploratory comparisons with plain {excluding} exclude 0; by chance "
        f"{(1 - LEVEL) * len(known):.1f} would. Holm's correction over all of them leaves {kept}."
    ]


def cost_blocks(tables: Sequence[ResultTable]) -> list[Block]:
    """The time of a training step and its memory, from runs that had the machine to themselves."""
    rows = [
        {
            "task": f"{table.recipe}: {title}",
            "method": FILTERS.get(line.method, line.name),
            "time of a step": ratio(line.times),
            "memory": ratio(line.memories),
        }
        for table, title in zip(tables, titles(tables), strict=True)
        for line in table.lines
        if line.times
    ]
    return [Grid(rows, ("task", "method"))] if rows else []


# tuning


_TUNED = {"lr", "filter_lr", "gain_lr", "warmup", "batch_size", "init_std", "dropout", "strength"}
_TUNED |= {"qk_norm"}
"""Settings and options that are tuned; any other makes another arm."""


def tuning_blocks(rows: pd.DataFrame) -> list[Block]:
    """The best choice on valid of each arm, for each task and length of training.

    Args:
        rows: those of ``results/tuning``, one of each run.
    """
    found = []
    for (recipe, task, epochs, _), own in rows.groupby(["recipe", "task", "epochs", "data"]):
        decimals = decimals_for(None, own.valid.mean())
        best = _best_choices(own)
        plain = best.get("plain")
        for first, (arm, (at, value, tried)) in enumerate(best.items()):
            lead = None if plain is None or arm == "plain" else value - plain[1]
            row = {
                "task": "" if first else f"{recipe}: {task}, {span([epochs], 3)} epochs",
                "arm": arm,
                "choices": str(tried),
                "best on valid": number(value, decimals),
                "− plain's best": signed(lead, decimals),
                "at": f"`{at}`" if at else "defaults",
            }
            found.append(row)
    return [Grid(found, ("task", "arm", "at"))] if found else []


def _best_choices(rows: pd.DataFrame) -> dict[str, tuple[str, float, int]]:
    """Of each arm, plain first: its best choice, what it has on valid, and how many were tried."""
    words = [text.split() for text in rows.settings]
    shared = set.intersection(*map(set, words))
    arms, choices = [], []
    for method, options, settings in zip(rows.method, rows.options, words, strict=True):
        own = [*options.split(), *(w for w in settings if w not in shared)]
        tuned = [word for word in own if word.partition("=")[0] in _TUNED]
        arms.append(" ".join([method, *(w for w in own if w not in tuned and "epochs" not in w)]))
        choices.append(" ".join(tuned))
    table = rows.assign(arm=arms, choice=choices)
    best = {}
    for arm in sorted(dict.fromkeys(arms), key=lambda arm: arm != "plain"):
        means = table[table.arm == arm].groupby("choice", sort=False).valid.mean().dropna()
        if len(means):
            at = means.idxmax() if rows.higher_is_better.iloc[0] else means.idxmin()
            best[arm] = (str(at), float(means[at]), len(means))
    return best


# contrasts of any two lines


@dataclass(frozen=True, eq=False)
class Place:
    """A line, and the table or the family that has it."""

    task: tuple[str, ...]
    table: tuple[object, ...]
    name: str
    words: frozenset[str]
    """Its options and settings."""
    line: Line
    label: str
    family: Judged | None = None
    keys: tuple[object, ...] = ()


def contrast_blocks(
    tables: Sequence[ResultTable], judged: Sequence[Judged], texts: Sequence[str]
) -> list[Block]:
    """Every contrast ``A - B`` of the texts; a ValueError says which lines there are instead.

    A line is a method and some of its options or settings, or a name of a family's file. Where one
    table or family has both, they are compared in it; otherwise each must be a single line of the
    task. Families that lack runs are left out: nothing of them is compared before their last run.
    """
    places = [*_places_of_tables(tables), *_places_of_families(judged)]
    rows = []
    for text in texts:
        found = [_contrast_cells(a, b, text) for a, b in _pairs(places, text)]
        kept = [row for row in found if row is not None]
        if not kept:
            names = list(dict.fromkeys(place.name for place in places))
            more = ", …" if len(names) > 20 else ""
            raise ValueError(
                f"no task has both lines of {text!r} over common seeds; there are "
                f"{', '.join(names[:20]) or 'none'}{more}"
            )
        rows += kept
    return [
        Text("Registered comparisons have Holm's p; the others are exploratory, not corrected."),
        Grid(rows, ("task", "a", "b", "kind", "reading", "at")),
    ]


def _places_of_tables(tables: Sequence[ResultTable]) -> list[Place]:
    found = []
    for at, table in enumerate(tables):
        task = (table.recipe, table.task, table.data or "")
        arrow = "" if table.higher_is_better else " ↓"
        for line in table.lines:
            words = frozenset([*table.settings.split(), *line.options.split()])
            label = f"{table.recipe}: {table.task}, {table.metric}{arrow}"
            found.append(Place(task, (at,), line.name, words, line, label))
    return found


def _places_of_families(judged: Sequence[Judged]) -> list[Place]:
    found = []
    for family, outcomes in judged:
        if not is_complete(outcomes):
            continue
        for own in lines_of(outcomes):
            words = frozenset([*own.line.options.split(), *own.keys[0].settings.split()])
            task = (family.name, *own.task, own.metric)
            label = f"{own.task[0]}: {own.task[1]}, {own.metric}"
            place = Place(
                task, task, own.name, words, own.line, label, (family, outcomes), own.keys
            )
            found.append(place)
    return found


def _pairs(places: Sequence[Place], text: str) -> list[tuple[Place, Place]]:
    sides = [part.strip() for part in re.split(r"\s[-−]\s", text)]
    if len(sides) != 2 or not all(sides):
        raise ValueError(
            f"--contrast takes 'A - B', two lines of a table or of a family, got {text!r}"
        )
    found = []
    for task in dict.fromkeys(place.task for place in places):
        own = [place for place in places if place.task == task]
        a, b = (_matching(own, side) for side in sides)
        pairs = [(x, y) for x in a for y in b if x.table == y.table and x is not y]
        if not pairs and a and b and not any(x is y for x in a for y in b):
            pairs = [(_single(a, sides[0]), _single(b, sides[1]))]
        for x, y in pairs:
            _refuse_other_data(x, y)
        found += pairs
    return found


def _matching(places: Sequence[Place], side: str) -> list[Place]:
    """The places of this name; without one, in each table those with the fewest other words."""
    exact = [place for place in places if place.family and place.name == side]
    if exact:
        return exact
    method, *wanted = side.split()
    found = [p for p in places if p.line.method == method and set(wanted) <= p.words]
    return [
        p for p in found if len(p.words) == min(len(q.words) for q in found if q.table == p.table)
    ]


def _single(places: Sequence[Place], side: str) -> Place:
    """The line with the fewest settings that were not asked for, if there is one such."""
    sizes = [len(place.words) for place in places]
    if sizes.count(min(sizes)) > 1:
        names = ", ".join(f"{place.name} ({' '.join(sorted(place.words))})" for place in places)
        raise ValueError(f"{side!r} is more than one line; name more settings; there are {names}")
    return places[sizes.index(min(sizes))]


def _refuse_other_data(a: Place, b: Place) -> None:
    """Raise ValueError if no row of one line is on the data of the other, as far as it is known."""
    first, second = (set(place.line.rows.data) - {""} for place in (a, b))
    if first and second and first.isdisjoint(second):
        raise ValueError(
            f"lines on different data are not compared: {a.name} on {', '.join(sorted(first))}; "
            f"{b.name} on {', '.join(sorted(second))}"
        )


def _contrast_cells(a: Place, b: Place, text: str) -> dict[str, str] | None:
    """None if the two have no seed in common."""
    found, kind, p_holm = contrast(a.line.rows, b.line.rows), "exploratory", None
    registered = None if a.family is None else _registered(a, b)
    if registered is not None:
        kind = f"registered in {a.task[0]}"
        # a failed pair leaves a registered comparison without a number; of two lines in the other
        # order p is the same, and the verdict the opposite
        found = None if registered.contrast is None else found
        registered = replace(registered, contrast=found)
        p_holm = registered.p_holm
    elif found is None:
        return None
    asked = set(text.split())
    cells = contrast_cells(found, decimals_of_contrast(found))
    return {
        "task": a.label,
        **{
            side: " ".join([place.name, *sorted((place.words & asked) - {*place.name.split()})])
            for side, place in (("a", a), ("b", b))
        },
        "kind": kind,
        **{name: cells[name] for name in ("pairs", "difference", "error reduction", "better", "p")},
        "p (Holm)": p_value(p_holm),
        "reading": cells["reading"] if registered is None else registered.verdict,
        **{name: cells[name] for name in ("on valid", "at")},
    }


def _registered(a: Place, b: Place) -> Outcome | None:
    """The family's own comparison of two lines, in whichever order."""
    assert a.family is not None
    for outcome in a.family[1]:
        one = outcome.comparison
        keys = {tuple(one.keys(one.a)), tuple(one.keys(one.b))}
        if keys == {a.keys, b.keys}:
            return outcome
    return None
