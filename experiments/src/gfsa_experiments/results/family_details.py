"""The page of families: each comparison on test and valid, seed by seed, and each line's runs."""

from __future__ import annotations

from collections.abc import Sequence

from gfsa_experiments.results.contrasts import UNIT_OF_NATS, contrast
from gfsa_experiments.results.families import Family
from gfsa_experiments.results.family_summary import (
    FamilyLine,
    Judged,
    contrast_scale,
    is_complete,
    lines_of,
    summary,
)
from gfsa_experiments.results.notes import seeds
from gfsa_experiments.results.number_format import (
    NONE,
    Scale,
    contrast_cells,
    number,
    p_value,
    scale_of_lines,
)
from gfsa_experiments.results.page_blocks import Block, Bullets, Commands, Grid, Heading, Text
from gfsa_experiments.results.tables import DEGREE_1, PLAIN
from gfsa_experiments.results.verdicts import Outcome

FOOTNOTES = [
    "A comparison is a − b over pairs of one seed, with Student's 95 % interval in brackets. *on "
    "valid*: the same on the part that settings were chosen by, which decides nothing here. "
    "*better* and *worse*: Holm's p below 0.05 over the family; *suggestive*: the interval alone "
    "excludes 0. *one commit*: pairs whose two runs are of the same commit.",
    "*error reduction*: the difference as a share of b's mean error (100 − score for scores in "
    f"percent); {UNIT_OF_NATS}.",
    "A line is one method with its options and settings, ± the standard deviation over seeds. *to "
    "plain*, *to degree 1*: differences on test to the lines of these names. Where the table "
    "above does not have the comparison, it was not registered and is exploratory.",
    "*c0 c1 …*: final coefficients of the powers of the attention map, averaged over heads, layers "
    "and seeds; *sum*: theirs, 1 at the start. *c0 < 0*: runs whose mean of c0 is negative, of "
    "those that learn it.",
    "*GPU seconds*: training time of a run, divided by the runs that shared the GPU.",
]


def families_page(judged: Sequence[Judged]) -> list[Block]:
    """Every complete family, what the others lack, and how to read it."""
    complete = [(family, found) for family, found in judged if is_complete(found)]
    others = [(family, found) for family, found in judged if not is_complete(found)]
    blocks = [block for family, found in complete for block in family_section(family, found)]
    if others:
        blocks += [Heading("Without a verdict"), Bullets([summary(*one) for one in others])]
    if complete:
        blocks += [Heading("How to read the tables"), Bullets(FOOTNOTES)]
    return blocks


def family_section(family: Family, outcomes: Sequence[Outcome]) -> list[Block]:
    """One complete family."""
    lines = lines_of(outcomes)
    shared = _shared_settings(lines)
    settings = f" Every line has `{' '.join(shared)}`, others by default." if shared else ""
    return [
        Heading(family.name),
        Text(f"{summary(family, outcomes)}{settings}"),
        _comparisons(outcomes),
        _lines(lines, shared),
        Text("Differences on test by seed:"),
        Bullets([_by_seed(outcome) for outcome in outcomes]),
        Commands([f"gfsa train {arguments}" for arguments in family.plan]),
    ]


def _comparisons(outcomes: Sequence[Outcome]) -> Grid:
    rows = []
    for outcome in outcomes:
        cells = contrast_cells(outcome.contrast, contrast_scale(outcome.contrast))
        row = {
            "comparison": outcome.comparison.name,
            "metric": outcome.comparison.metric,
            "pairs": str(outcome.pairs),
            **{name: cells[name] for name in ("difference", "on valid")},
            "pairs better": cells["better"],
            "error reduction": cells["error reduction"],
            "p": cells["p"],
            "p (Holm)": p_value(outcome.p_holm),
            "verdict": outcome.verdict,
            "at": cells["at"],
            "one commit": cells["one commit"],
        }
        rows.append(row)
    words = ("comparison", "metric", "verdict", "at")
    return Grid(list(rows[0]), [list(row.values()) for row in rows], words)


def _lines(lines: Sequence[FamilyLine], shared: Sequence[str]) -> Grid:
    rows = [_line_cells(own, lines, shared) for own in lines]
    return Grid(list(rows[0]), [list(row.values()) for row in rows], ("line", "runs", "commit"))


def _line_cells(
    own: FamilyLine, lines: Sequence[FamilyLine], shared: Sequence[str]
) -> dict[str, str]:
    line = own.line
    alike = [other for other in lines if other.metric == own.metric]
    scale = scale_of_lines([other.line for other in alike])
    spread = "" if line.std is None else f" ± {scale.number(line.std)}"
    failed = f", failed: {seeds(line.failed)}" if line.failed else ""
    words = [word for word in own.key.settings.split() if word not in shared]
    coefficients, c0, seconds = line.coefficients, line.c0, line.gpu_seconds
    return {
        "line": own.name,
        "runs": f"`{' '.join([line.name, *words])}`",
        "seeds": f"{len(line.rows)}{failed}",
        "test": scale.number(line.mean) + spread,
        "valid": scale.number(line.valid),
        "to plain": _difference_to(PLAIN[0], own, alike, scale),
        "to degree 1": _difference_to(DEGREE_1, own, alike, scale),
        "c0 c1 …": " ".join(number(c, 3) for c in coefficients) if coefficients else NONE,
        "sum": number(sum(coefficients), 3) if coefficients else NONE,
        "c0 < 0": f"{sum(value < 0 for value in c0)}/{len(c0)}" if c0 else NONE,
        "GPU seconds": NONE if seconds is None else f"{seconds:.3g}",
        "commit": ", ".join(dict.fromkeys(line.rows.commit)) or NONE,
    }


def _difference_to(name: str, own: FamilyLine, lines: Sequence[FamilyLine], scale: Scale) -> str:
    """To the one line of this name on the same task."""
    found = [line for line in lines if line.name == name and line.task == own.task]
    if len(found) != 1 or found[0] is own:
        return NONE
    return contrast_cells(contrast(own.line.rows, found[0].line.rows), scale)["difference"]


def _shared_settings(lines: Sequence[FamilyLine]) -> list[str]:
    every = [own.key.settings.split() for own in lines]
    return [word for word in every[0] if all(word in words for words in every)]


def _by_seed(outcome: Outcome) -> str:
    name = outcome.comparison.name
    if outcome.contrast is None:
        return f"{name}: {outcome.verdict}."
    test, scale = outcome.contrast.test, contrast_scale(outcome.contrast)
    values = ", ".join(scale.signed(value) for value in test.values)
    return f"{name} ({_in_order(test.seeds)}): {values}"


def _in_order(numbers: Sequence[int]) -> str:
    """``seeds 100–105``; all of them if some between are missing."""
    first, last = numbers[0], numbers[-1]
    gapless = len(numbers) > 2 and list(numbers) == list(range(first, last + 1))
    return f"seeds {first}–{last}" if gapless else seeds(numbers)
