"""What rows say, as Markdown (verdicts of families, tables, tuning) and as a forest plot."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import pandas as pd

from gfsa_experiments.results.families import Family, Judged, Outcome, is_complete
from gfsa_experiments.results.statistics import LEVEL, Contrast, Interval, contrast, holm
from gfsa_experiments.results.tables import PLAIN, Line, ResultTable, coefficients_of

NONE = "–"
NAMES = {
    "degree1": "degree 1",
    "gfsa": "GFSA",
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
_FROM_SCRATCH = ("pretrain", "image", "graph", "speech", "lra", "stdlib")
# settings and options that are tuned; any other makes another arm
_TUNED = {"lr", "filter_lr", "gain_lr", "warmup", "batch_size", "init_std", "dropout", "strength"}
_TUNED |= {"qk_norm"}
_FOREST_AXIS = "relative error reduction in percent, 95 % interval (right is better)"
# inches
_WIDTH, _ROW = 7.4, 0.27


def number(value: float | None, decimals: int, sign: str = "") -> str:
    """``−0.50``, a dash for None; ``sign="+"`` writes a plus sign as well."""
    if value is None:
        return NONE
    # −0.00 is printed without sign
    return re.sub(r"^-(?=[0.]+$)", "", f"{value:{sign}.{decimals}f}").replace("-", "−")


def interval(found: Interval | None, decimals: int, unit: str = "") -> str:
    """``+0.70 (+0.41 … +0.99)``; what would be rounded to 0, or out of its interval, has more."""
    if found is None:
        return NONE
    if found.low is None or found.high is None:
        return number(found.mean, decimals, "+") + unit
    digits = decimals
    for end in (found.low, found.high):
        while end and not round(end, digits) and digits < 6:
            digits += 1
    is_outside = found.excludes_zero and not round(found.mean, decimals)
    shown = number(found.mean, digits if is_outside else decimals, "+")
    return f"{shown}{unit} ({number(found.low, digits, '+')} … {number(found.high, digits, '+')})"


def _decimals(spread: float | None, size: float) -> int:
    """Decimals for two digits of the spread; without a spread, for four of the number itself."""
    if spread:
        digits = 1 - math.floor(math.log10(spread))
    else:
        digits = 3 - math.floor(math.log10(abs(size))) if size else 2
    return min(max(digits, 1), 5)


def _decimals_of_lines(lines: Sequence[Line]) -> int:
    """Enough for the spread over seeds of a typical line."""
    spreads = [line.std for line in lines if line.std]
    sizes = [abs(value) for line in lines for value in line.rows.test]
    return _decimals(median(spreads) if spreads else None, mean(sizes or [0.0]))


def _decimals_of_contrast(found: Contrast) -> int:
    return _decimals(pd.Series(found.test.values).std(), found.error)


def grid(rows: Sequence[Mapping[str, str]], words: Sequence[str] = ()) -> list[str]:
    """A table, a dictionary per row; the columns named in ``words`` are aligned left."""
    if not rows:
        return []
    columns = list(rows[0])
    rules = ["---" if column in words else "---:" for column in columns]
    cells = [columns, rules, *([row[column] for column in columns] for row in rows)]
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in cells]
    return ["\n".join(f"| {' | '.join(line)} |" for line in escaped)]


def _bullets(items: Sequence[str]) -> list[str]:
    return ["\n".join(f"- {item}" for item in items)] if items else []


def named(comparison: str, family: str) -> str:
    """``gfsa − plain`` in the words of pages, ``GFSA − plain``; a family may have its own."""
    lines = comparison.split(" − ")
    return " − ".join(NAMES.get(f"{family}/{line}", NAMES.get(line, line)) for line in lines)


def _difference(found: Contrast | None, decimals: int | None = None) -> str:
    if found is None:
        return NONE
    return interval(found.test, decimals or _decimals_of_contrast(found))


def _comparison_cells(outcome: Outcome) -> dict[str, str]:
    found, p = outcome.contrast, outcome.p_holm
    return {
        "pairs": str(outcome.pairs),
        "difference": _difference(found),
        "error reduction": interval(None if found is None else found.reduction, 1, " %"),
        "p (Holm)": NONE if p is None else "<0.001" if p < 0.001 else f"{p:.3f}",
        "verdict": outcome.verdict,
    }


def verdicts(judged: Sequence[Judged]) -> list[str]:
    """Every comparison of the complete families, and what the others lack."""
    rows, said = [], []
    for family, outcomes in judged:
        if not is_complete(outcomes) and not any(outcome.unusable for outcome in outcomes):
            said.append(summary(family, outcomes))
            continue
        rows += [
            {
                "setting": "" if first else f"{_link(family)}: {family.title}",
                "comparison": named(outcome.comparison.name, family.name),
                **_comparison_cells(outcome),
            }
            for first, outcome in enumerate(outcomes)
        ]
    return [*grid(rows, ("setting", "comparison", "verdict")), *_bullets(said)]


def score_blocks(judged: Sequence[Judged]) -> list[str]:
    """One row per complete family, for a first page: both scores, and the answer at equal time.

    The row is about the line that is compared with one named ``longer …``, plain for as long as the
    other trained, or else about the first line that is compared with plain.
    """
    rows = []
    for family, outcomes in judged:
        lines = dict(_lines_of(outcomes))
        longer = [o for o in outcomes if o.comparison.b.startswith("longer") and o.contrast]
        leads = [*longer, *(o for o in outcomes if o.comparison.b == PLAIN and o.contrast)]
        if not leads or PLAIN not in lines:
            continue
        name, metric = leads[0].comparison.a, leads[0].comparison.metric
        own, plain = lines[name], lines[PLAIN]
        registered = [o for o in leads if (o.comparison.a, o.comparison.b) == (name, PLAIN)]
        verdict = registered[0].verdict if registered else "exploratory"
        decimals = _decimals_of_lines([own, plain])
        row = {
            "setting": f"[{family.title.partition(':')[0]}](families/{family.path.name}), {metric}",
            "plain": number(plain.mean, decimals),
            "filtered": f"{number(own.mean, decimals)} ({named(name, family.name)})",
            "difference": _short(contrast(own.rows, plain.rows), verdict),
            "seeds": str(len(own.rows)),
            "at equal time": _short(longer[0].contrast, longer[0].verdict) if longer else "not run",
        }
        rows.append(row)
    return grid(rows, ("setting", "difference", "at equal time"))


def _short(found: Contrast | None, verdict: str) -> str:
    """``−1.49, better``"""
    if found is None:
        return f"{NONE}, {verdict}"
    return f"{number(found.test.mean, _decimals_of_contrast(found), '+')}, {verdict}"


def summary(family: Family, outcomes: Sequence[Outcome]) -> str:
    """What is compared on what, and the runs it took or lacks."""
    metrics = ", ".join(dict.fromkeys(outcome.comparison.metric for outcome in outcomes))
    if family.withdrawn:
        return f"{_link(family)}: {family.title}; withdrawn before any run: {family.withdrawn}."
    state = f"registered {family.registered:%Y-%m-%d}" if family.registered else "planned"
    head = f"{_link(family)}: {family.title}, {metrics}, {state}"
    if is_complete(outcomes):
        lines = [line for _, line in _lines_of(outcomes)]
        count = sum(len(line.rows) + len(line.failed) for line in lines)
        commits = dict.fromkeys(commit for line in lines for commit in line.rows.commit)
        return f"{head}; {count} runs at commit {', '.join(commits)}."
    names = "; ".join(outcome.comparison.name for outcome in outcomes)
    counts = sorted({len(outcome.comparison.seeds) for outcome in outcomes})
    head = f"{head}, {names}, {' or '.join(map(str, counts))} seeds"
    if not _has_runs(outcomes):
        return f"{head}, not run."
    return f"{head}; {'; '.join(dict.fromkeys(outcome.verdict for outcome in outcomes))}."


def family_section(family: Family, outcomes: Sequence[Outcome]) -> list[str]:
    """One family: its comparisons and its lines; before its last run what it lacks."""
    head = [f"## {family.name}", summary(family, outcomes)]
    commands = ["\n".join(["```", *(f"gfsa train {line}" for line in family.plan), "```"])]
    if not _has_runs(outcomes):
        return head if family.withdrawn else head + commands
    compared = [
        {
            "comparison": outcome.comparison.name,
            "metric": outcome.comparison.metric,
            **_comparison_cells(outcome),
            "at": NONE if outcome.contrast is None else outcome.contrast.budget,
        }
        for outcome in outcomes
    ]
    head += grid(compared, ("comparison", "metric", "verdict", "at"))
    if not is_complete(outcomes):
        return head + commands
    lines = _lines_of(outcomes)
    decimals = _decimals_of_lines([line for _, line in lines])
    shown = [
        {"line": name, "runs": f"`{line.name}`", **_line_cells(line, decimals)}
        for name, line in lines
    ]
    return [*head, *grid(shown, ("line", "runs"))]


def _line_cells(line: Line, decimals: int) -> dict[str, str]:
    failed = f", failed: {_seeds(line.failed)}" if line.failed else ""
    spread = "" if line.std is None else f" ± {number(line.std, decimals)}"
    return {
        "seeds": f"{len(line.rows)}{failed}",
        "test": number(line.mean, decimals) + spread,
        "c0 c1 …": " ".join(number(c, 3) for c in line.coefficients or ()) or NONE,
    }


def _lines_of(outcomes: Iterable[Outcome]) -> list[tuple[str, Line]]:
    """Every line of a complete family once, in the order of the comparisons."""
    # two comparisons may give one name settings of their own
    found = {(n, *o.comparison.keys[n]): (n, line) for o in outcomes for n, line in o.lines.items()}
    return list(found.values())


def _has_runs(outcomes: Sequence[Outcome]) -> bool:
    return any(outcome.missing < len(outcome.comparison.seeds) for outcome in outcomes)


def _link(family: Family) -> str:
    return f"[{family.name}](families/{family.path.name})"


def titles(tables: Sequence[ResultTable]) -> list[str]:
    """The task of each table, with what distinguishes it from other tables of that task."""
    named = []
    for table in tables:
        alike = [t for t in tables if (t.recipe, t.task) == (table.recipe, table.task)]
        shared = set.intersection(*(set(t.settings.split()) for t in alike))
        own = " ".join(word for word in table.settings.split() if word not in shared)
        apart = [own or "otherwise"] if len({t.settings for t in alike}) > 1 else []
        if len({t.data for t in alike if t.settings == table.settings}) > 1:
            apart.append(f"data {table.data or 'not recorded'}")
        named.append(f"{table.task} ({', '.join(apart)})" if apart else table.task)
    return named


def table_blocks(tables: Sequence[ResultTable], reference: str = PLAIN) -> list[str]:
    """All lines of all tables, and notes on what is missing, failed or repeated."""
    rows, notes = [], []
    for table, title in zip(tables, titles(tables), strict=True):
        decimals = _decimals_of_lines(table.lines)
        arrow = "" if table.higher_is_better else " ↓"
        for first, line in enumerate(table.lines):
            found, cells = line.to_reference, _line_cells(line, decimals)
            row = {
                "task": "" if first else f"{table.recipe}: {title}, {table.metric}{arrow}",
                "method": line.name,
                "seeds": cells["seeds"],
                "test": cells["test"],
                f"difference to {reference}": _difference(found, decimals),
                "exploratory": (found and found.test.reading) or NONE,
                "c0 c1 …": cells["c0 c1 …"],
            }
            rows.append(row)
        notes += [f"{title}: {note}" for note in notes_of(table, reference)]
    return [*grid(rows, ("task", "method", "exploratory")), *_bullets(notes)]


def answers(tables: Sequence[ResultTable], reference: str = PLAIN) -> list[str]:
    """What a caller's own rows say, a sentence for each method, and what is odd about them."""
    words = {"better": f"is better than {reference}", "worse": f"is worse than {reference}"}
    said = []
    for table, title in zip(tables, titles(tables), strict=True):
        decimals = _decimals_of_lines(table.lines)
        for line in table.lines:
            found = line.to_reference
            if found is None:
                continue
            verdict = words.get(found.test.verdict or "", f"shows no difference to {reference}")
            if found.test.low is None:
                verdict = f"differs from {reference}; one seed cannot say more"
                if not any(found.test.values):
                    verdict = f"ends exactly where {reference} does"
            seeds = len(found.test.seeds)
            more = "" if seeds > 4 else "; five seeds or more make the interval narrower"
            said.append(
                f"{title}: {line.name} {verdict}: {interval(found.test, decimals)} {table.metric} "
                f"over {seeds} {'seed' if seeds == 1 else 'seeds'}{more}."
            )
        values = set(table.rows.test)
        if len(table.rows) > 1 and len(values) == 1:
            said.append(
                f"{title}: every run has {table.metric} {values.pop():g}: the models may predict "
                "one constant answer; train for longer, or with another lr."
            )
    return _bullets(said)


def _seeds(numbers: Iterable[int]) -> str:
    """``seed 3``, ``seeds 0, 1, 2``"""
    ordered = sorted(numbers)
    return f"{'seed' if len(ordered) == 1 else 'seeds'} {', '.join(map(str, ordered))}"


def notes_of(table: ResultTable, reference: str = PLAIN) -> list[str]:
    """The notes of one table: missing, failed, repeated and single seeds."""
    notes = []
    if table.reference is None:
        notes.append(f"no run of {reference} with these settings, so no difference.")
    # lines with the same note share it
    alike: dict[str, list[str]] = {}
    for line in table.lines:
        for note in _notes_of_line(line, table.reference):
            alike.setdefault(note, []).append(line.name)
    notes += [f"{', '.join(names)}: {note}" for note, names in alike.items()]
    for key, count in table.replaced.value_counts(["method", "options"]).items():
        rows = "row was" if count == 1 else "rows were"
        name = " ".join(key).strip()
        notes.append(f"{name}: {count} {rows} replaced by a later run of the same seed.")
    return notes


def _notes_of_line(line: Line, reference: Line | None) -> list[str]:
    notes = []
    if line.failed:
        notes.append(
            f"{_seeds(line.failed)} ended without a finite number; this counts in no mean and no "
            "difference, and speaks against the method."
        )
    if reference is None or line is reference:
        return notes
    ours, theirs, name = set(line.rows.seed), set(reference.rows.seed), reference.name
    both = ours & theirs
    if not both:
        return [*notes, f"has no seed in common with {name}, so no difference."]
    if ours != theirs:
        alone = [f"{_seeds(ours - theirs)} ran without {name}"] if ours - theirs else []
        alone += [f"{name} alone has {_seeds(theirs - ours)}"] if theirs - ours else []
        notes.append(f"{' and '.join(alone)}; the difference is over {_seeds(both)}.")
    if line.to_reference is not None and line.to_reference.test.low is None:
        why = "one seed" if len(both) == 1 else "the same difference on every seed"
        notes.append(f"{why}, so no interval.")
    return notes


def overall(tables: Sequence[ResultTable]) -> list[str]:
    """What is regular over all runs, and how many comparisons would exclude 0 by chance."""
    scratch = [
        coefficients_of(row)[0]
        for table in tables
        for row in table.rows.itertuples()
        if row.coefficients and row.method in ("gfsa", "gfsa-even", "degree1")
        if not re.search(r"\blearn=(?!\S*w0)", row.options)
        if row.recipe in _FROM_SCRATCH or "model=scratch" in row.command
    ]
    notes = []
    if scratch:
        negative = sum(c0 < 0 for c0 in scratch)
        notes.append(
            f"The mean of c0 is negative in {negative} of {len(scratch)} runs from scratch."
        )
    tests = [x.to_reference.test for table in tables for x in table.lines if x.to_reference]
    ps = [test.p for test in tests if test.p is not None]
    # of one comparison there is nothing to correct
    if len(ps) > 1:
        excluding = sum(test.excludes_zero for test in tests)
        kept = sum(p < 1 - LEVEL for p in holm(ps))
        notes.append(
            f"Of {len(ps)} exploratory comparisons with plain {excluding} exclude 0; by chance "
            f"{(1 - LEVEL) * len(ps):.1f} would. Holm's correction over all of them leaves {kept}."
        )
    return _bullets(notes)


def tuning_blocks(rows: pd.DataFrame) -> list[str]:
    """The best choice on valid of each arm, for each task and length of training."""
    found = []
    for (recipe, task, epochs, _), own in rows.groupby(["recipe", "task", "epochs", "data"]):
        decimals = _decimals(None, own.valid.mean())
        best = _best_choices(own)
        plain = best.get(PLAIN)
        # what every arm chose stands once
        common = set.intersection(*(set(at.split()) for at, *_ in best.values())) if best else set()
        for first, (arm, (at, value, tried)) in enumerate(best.items()):
            lead = None if plain is None or arm == PLAIN else value - plain[1]
            chosen = " ".join(word for word in at.split() if word not in common)
            of = f"{recipe}: " if rows.recipe.nunique() > 1 else ""
            title = " ".join([f"{of}{task}, {epochs:.3g} epochs", *sorted(common)])
            row = {
                "task": "" if first else title,
                "arm": arm,
                "choices": str(tried),
                "best on valid": number(value, decimals),
                "− plain's best": number(lead, decimals, "+"),
                "at": f"`{chosen}`" if chosen else NONE if at else "defaults",
            }
            found.append(row)
    return grid(found, ("task", "arm", "at"))


def _best_choices(rows: pd.DataFrame) -> dict[str, tuple[str, float, int]]:
    """Of each arm, plain first: its best choice, what it has on valid, and how many were tried."""
    shared = set.intersection(*(set(text.split()) for text in rows.settings))
    # arm → choice → its results on valid
    tried: dict[str, dict[str, list[float]]] = {PLAIN: {}}
    for row in rows[rows.valid.notna()].itertuples():
        own = [*row.options.split(), *(w for w in row.settings.split() if w not in shared)]
        tuned = [word for word in own if word.partition("=")[0] in _TUNED]
        arm = " ".join([row.method, *(w for w in own if w not in tuned and "epochs" not in w)])
        tried.setdefault(arm, {}).setdefault(" ".join(tuned), []).append(row.valid)
    choose = max if rows.higher_is_better.iloc[0] else min
    best = {}
    for arm, choices in tried.items():
        means = {choice: mean(values) for choice, values in choices.items()}
        if means:
            at = choose(means, key=means.__getitem__)
            best[arm] = (at, means[at], len(means))
    return best


# how tables name the variants of gfsa bench; a kernel of its own for a decoded token is part of it
_VARIANTS = {
    "gfsa degree 1": "degree 1",
    "degree 1": "degree 1",
    "gfsa exclusive": "exclusive",
    "exclusive": "exclusive",
    "gfsa exclusive depth": "exclusive + depth",
    "gfsa": "GFSA",
    "degree 2": "GFSA",
}


def speed_blocks(path: Path, suite: str, timing: str) -> list[str]:
    """What ``gfsa bench`` measured on GPUs, of one suite and one way of timing.

    A cell is the latest measurement of a shape and a variant, in times of plain in the same run:
    forward and backward, then forward alone.
    """
    rows = pd.read_csv(path)
    rows = rows[rows.cuda.notna()]
    measured = rows[(rows.suite == suite) & (rows.timing == timing)]
    if measured.empty:
        there = sorted({f"{name} {how}" for name, how in zip(rows.suite, rows.timing, strict=True)})
        raise ValueError(
            f"{path} has no times of the suite {suite or '(--recipe)'} timed as "
            f"{timing or '(--task)'} on a GPU; it has {', '.join(there) or 'none'}"
        )
    variants = measured.variant.str.removesuffix(" kernel").replace(_VARIANTS)
    columns = [name for name in dict.fromkeys(_VARIANTS.values()) if name in set(variants)]
    measured = measured.assign(variant=variants)[variants.isin([PLAIN, *columns])]
    latest = measured.sort_values("date", kind="stable").groupby(["shape", "variant"]).tail(1)
    cells = [
        _speed_cells(shape, found.set_index("variant"), columns)
        for shape, found in latest.groupby("shape", sort=False)
        if PLAIN in set(found.variant) and len(found) > 1
    ]
    words, commits = ("shape", "commit"), {row["commit"] for row in cells}
    if len(cells) < 2 or len(commits) > 1:
        return grid(cells, words)
    # said once, below the table
    rows = [{name: x for name, x in row.items() if name != "commit"} for row in cells]
    return [*grid(rows, words), f"Commit {commits.pop()}."]


def _speed_cells(shape: str, found: pd.DataFrame, columns: Sequence[str]) -> dict[str, str]:
    plain = found.loc[PLAIN]
    cells = {
        "shape": shape,
        "plain ms": f"{plain.fwd_ms if pd.isna(plain.fwd_bwd_ms) else plain.fwd_bwd_ms:.3g}",
    }
    for name in columns:
        times = found.reindex([name]).iloc[0][["fwd_bwd_ratio", "fwd_ratio"]].dropna()
        cells[name] = "/".join(f"{x:.2f}×" for x in times) or NONE
    return cells | {"commit": ", ".join(found.drop(PLAIN).commit.unique())}


class Mark(NamedTuple):
    """One interval of the plot; marks of one ``group`` have its title above them."""

    group: str
    label: str
    interval: Interval
    verdict: str
    is_registered: bool


def marks(tables: Sequence[ResultTable], judged: Sequence[Judged] = ()) -> list[Mark]:
    """The comparisons of complete families; without one, every line of the tables with plain."""
    registered = [
        (family.title.partition(":")[0], named(o.comparison.name, family.name), o.contrast, o)
        for family, outcomes in judged
        for o in outcomes
        if o.contrast is not None
    ]
    explored = [
        (f"{table.recipe}: {title}", line.name, line.to_reference, None)
        for table, title in zip(tables, titles(tables), strict=True)
        for line in table.lines
    ]
    return [
        Mark(
            f"{group} ({found.reduced})",
            label,
            found.reduction,
            outcome.verdict if outcome else found.test.reading or "",
            is_registered=outcome is not None,
        )
        for group, label, found, outcome in registered or explored
        if found is not None and found.reduction is not None
    ]


def plot(tables: Sequence[ResultTable], path: Path, judged: Sequence[Judged] = ()) -> None:
    """Write the figure, in the format of the path's extension."""
    import matplotlib

    figure = draw(marks(tables, judged))
    formats = figure.canvas.get_supported_filetypes()
    if path.suffix.lstrip(".") not in formats:
        raise ValueError(
            f"--plot {path}: cannot write {path.suffix or 'a file without extension'}; "
            f"known extensions: {', '.join(sorted(formats))}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    # text stays text, and the same rows give the same file
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "gfsa"}):
        figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)


def draw(drawn: Sequence[Mark]) -> Any:
    """The figure; right is better. Marks of registered comparisons are filled."""
    from matplotlib.figure import Figure
    from matplotlib.transforms import blended_transform_factory

    if not drawn:
        raise ValueError("no run can be compared with plain, so there is nothing to plot")
    # a row for the title of each group, and one for each of its marks
    rows = list(dict.fromkeys(row for m in drawn for row in ((m.group, ""), (m.group, m.label))))
    figure = Figure(figsize=(_WIDTH, 0.9 + _ROW * len(rows)), layout="constrained")
    axis = figure.subplots()
    axis.axvline(0, color="#000000", linewidth=0.8)
    for mark in drawn:
        height, colour = rows.index((mark.group, mark.label)), "#000000"
        low, high = mark.interval.low, mark.interval.high
        if low is not None and high is not None:
            axis.plot([low, high], [height, height], color=colour, linewidth=1.6)
        fill = colour if mark.is_registered else "white"
        axis.plot(mark.interval.mean, height, "D", color=colour, mfc=fill, markersize=6)
        beside: Any = {"transform": axis.get_yaxis_transform(), "va": "center", "fontsize": 8}
        weight = "bold" if mark.verdict == "better" else "normal"
        axis.text(1.01, height, mark.verdict, weight=weight, **beside)
    # beside the labels too: a title may be as long as the figure is wide
    across = blended_transform_factory(figure.transFigure, axis.transData)
    for height, (group, label) in enumerate(rows):
        if not label:
            title = axis.text(0.015, height, group, transform=across, va="center", weight="bold")
            title.set(fontsize=9, backgroundcolor="white", in_layout=False)
    labels = {height: label for height, (_, label) in enumerate(rows) if label}
    axis.set_yticks([*labels], [*labels.values()], fontsize=9)
    axis.set_ylim(len(rows) - 0.45, -0.55)
    axis.set_xlabel(_FOREST_AXIS)
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="x", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)
    return figure
