"""Notes under a table (missing, failed and repeated seeds, other data), and how to read tables."""

from __future__ import annotations

from collections.abc import Iterable

from gfsa_experiments.results.tables import Line, ResultTable


def notes_of(table: ResultTable) -> list[str]:
    """The notes of one table: its data, and missing, failed, repeated and single seeds."""
    notes = _of_data(table)
    plain = table.plain
    if plain is None:
        notes.append("No run of plain with these settings: no difference can be given.")
    for line in table.lines:
        notes.extend(_of_line(line, plain))
    for (method, options), count in table.replaced.value_counts(["method", "options"]).items():
        rows = "row was" if count == 1 else "rows were"
        name = f"{method} {options}".strip()
        notes.append(f"{name}: {count} {rows} replaced by a later run of the same seed.")
    return notes


def _of_data(table: ResultTable) -> list[str]:
    """The data of the rows, if it is not the same for all."""
    rows = table.rows
    without_data = int((rows.data == "").sum())
    notes = []
    if table.data:
        notes.append(
            f"Runs on other data have tables of their own and are not compared with these, which "
            f"are on {table.data} (examples to train+validate+test on, and a hash of some)."
        )
    elif table.data == "":
        notes.append(
            "These rows are of a version that did not note the data, and there are later ones on "
            "different data; they are compared with each other alone."
        )
    if 0 < without_data < len(rows):
        notes.append(
            f"{without_data} of {len(rows)} rows are of a version that did not note the data; they "
            "are taken to be on that of the others."
        )
    return notes


def _of_line(line: Line, plain: Line | None) -> list[str]:
    notes = []
    if line.failed:
        notes.append(
            f"{line.name}: {seeds(line.failed)} ended without a finite number; this counts in no "
            "mean and no difference, and speaks against the method."
        )
    if plain is None or line is plain:
        return notes
    ours, theirs = set(line.values), set(plain.values)
    if not ours & theirs:
        notes.append(f"{line.name}: has no seed in common with plain, so no difference.")
        return notes
    if ours != theirs:
        alone = [f"{seeds(ours - theirs)} ran without plain"] if ours - theirs else []
        alone += [f"plain alone has {seeds(theirs - ours)}"] if theirs - ours else []
        notes.append(
            f"{line.name}: {' and '.join(alone)}; the difference is over {seeds(ours & theirs)}."
        )
    if line.difference is not None and line.difference.low is None:
        why = "one seed" if len(line.difference.seeds) == 1 else "the same difference on every seed"
        notes.append(f"{line.name}: {why}, so no interval.")
    return notes


def seeds(numbers: Iterable[int]) -> str:
    """``seed 3``, ``seeds 0, 1, 2``"""
    ordered = sorted(numbers)
    return f"{'seed' if len(ordered) == 1 else 'seeds'} {', '.join(map(str, ordered))}"


FOOTNOTES = [
    "A line is one method with its options, ± the standard deviation over seeds. Differences are "
    "paired by seed, with Student's 95 % interval in brackets; p is two-sided and not corrected. "
    "These comparisons are exploratory: *suggestive* where the interval excludes 0, *not shown* "
    "otherwise; *better* and *worse* are said of families alone.",
    "*on valid*: the difference to plain on the part that options may be chosen by; the test split "
    "chooses nothing. *to degree 1*: the difference to the table's line without a second pass. "
    "*one commit*: pairs whose two runs are of the same commit.",
    "*added*: learned numbers the method adds. *moved*: mean |coefficient − start| at the end. "
    "*c0 c1 …*: final coefficients of the powers of the attention map, averaged over heads, layers "
    "and seeds; *sum*: theirs, 1 at the start.",
    "*time*: of a training step, relative to plain (whose line has it in milliseconds), only from "
    "runs that had the machine to themselves, on the same device. *memory*: peak GPU memory, "
    "likewise; runs with graphs=True of 2026-11-17 and before may count 65 MiB for each earlier "
    "run of their process. *GPU seconds*: training time of a run, divided by the runs that shared "
    "the GPU.",
]
