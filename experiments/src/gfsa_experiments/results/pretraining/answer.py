"""What families say, in sentences: each outcome has its wording before its runs are read.

*Confirmed* stands for Holm's p below 0.05 over the whole family, and for nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gfsa_experiments.results.family_summary import NAMES
from gfsa_experiments.results.number_format import Scale, p_value
from gfsa_experiments.results.page_blocks import Block, Grid, Heading, Text
from gfsa_experiments.results.statistics import Interval
from gfsa_experiments.results.verdicts import Outcome

NATS = Scale(1, 3)
CONFIRMED = ("better", "worse")
NOT_SHOWN = "not shown"
QUESTIONS = {
    ("gfsa", "plain"): "does GFSA end lower than plain?",
    ("degree1", "plain"): "does degree 1 end lower than plain?",
    ("gfsa", "degree1"): "does the second pass bring more than degree 1?",
    ("gfsa", "gain"): "is it more than a learned gain per head?",
    ("gfsa", "gated"): "is it more than gated heads bring?",
    ("gfsa", "longer"): "is it more than plain brings with 13 % more steps?",
    ("degree1", "gain"): "is degree 1 more than a learned gain per head?",
    ("degree1", "gated"): "is degree 1 more than gated heads bring?",
    ("both", "gated"): "does degree 1 bring anything on top of gated heads?",
    ("degree1", "residual"): "is degree 1 more than a fixed value residual brings?",
}


def answers(families: Mapping[str, Sequence[Outcome]], lengths: Mapping[str, str]) -> str:
    """A paragraph for each family, which begins with the length of its runs."""
    if not families:
        return answer([])
    said = (f"*After {lengths[name]}.* {answer(found)}" for name, found in families.items())
    return "\n\n".join(said)


def answer(outcomes: Sequence[Outcome]) -> str:
    """One paragraph: every verdict of a family of which all runs are there, or that they are not.

    No comparison is left out: what a control brings is part of the answer, whatever it is.
    """
    if not all(outcome.is_complete for outcome in outcomes):
        return _why_nothing_yet(outcomes)
    if not outcomes:
        return "**Nothing is confirmed:** there is no family of confirmatory runs."
    shown = [outcome for outcome in outcomes if outcome.verdict in CONFIRMED]
    others = [outcome for outcome in outcomes if outcome.verdict not in CONFIRMED]
    said = [*map(sentence, shown), *([not_confirmed(others)] if others else [])]
    return " ".join([f"**{_against_plain(outcomes)}**", *said])


def _why_nothing_yet(outcomes: Sequence[Outcome]) -> str:
    """A family that lacks pairs."""
    if any(outcome.unusable for outcome in outcomes):
        return (
            "**Nothing is confirmed:** pairs of the family of confirmatory runs do not count; "
            "the table below says why. What follows is exploratory."
        )
    pairs = sum(outcome.pairs for outcome in outcomes)
    return (
        f"**Nothing is confirmed yet:** the family of confirmatory runs has {pairs} of its "
        f"{sum(len(o.comparison.seeds) for o in outcomes)} pairs, and no number is read from "
        "it before the last. What follows is exploratory."
    )


def _against_plain(outcomes: Sequence[Outcome]) -> str:
    """Which arms are shown to end lower or higher than plain."""
    verdicts = {o.comparison.a: o.verdict for o in outcomes if o.comparison.b == "plain"}
    parts = []
    for word, side in (("better", "lower"), ("worse", "higher")):
        lines = [line for line, verdict in verdicts.items() if verdict == word]
        if lines:
            names = " and ".join(NAMES.get(line, line) for line in lines)
            parts.append(f"{names} end{'s' if len(lines) == 1 else ''} {side} than plain")
    if not parts:
        return "Not confirmed: no filter is shown to end lower than plain."
    return f"Confirmed: {', '.join(parts)}."


def sentence(outcome: Outcome) -> str:
    """A confirmed comparison: which ends lower, and by how much."""
    assert outcome.contrast is not None
    a, b = _names(outcome)
    found = outcome.contrast.test.interval
    side = "lower" if found.mean < 0 else "higher"
    return f"{a[0].upper() + a[1:]} ends {_size(found)} nats {side} than {b} ({_holm(outcome)})."


def not_confirmed(outcomes: Sequence[Outcome]) -> str:
    """The comparisons without a confirmed difference; the table has the intervals."""
    parts = []
    for outcome in outcomes:
        name = " − ".join(_names(outcome))
        parts.append(name if outcome.verdict == NOT_SHOWN else f"{name} ({outcome.verdict})")
    return f"No difference is confirmed for {', '.join(parts)} ([table](#confirmatory-families))."


def _names(outcome: Outcome) -> tuple[str, str]:
    a, b = (NAMES.get(x, x) for x in (outcome.comparison.a, outcome.comparison.b))
    return a, b


def _holm(outcome: Outcome) -> str:
    holm = p_value(outcome.p_holm)
    return f"Holm's p {'< ' + holm[1:] if holm.startswith('<') else '= ' + holm}"


def _size(found: Interval) -> str:
    """``0.021 (0.012 … 0.030)``, without sign."""
    ends = [abs(end) for end in (found.low, found.high) if end is not None]
    inside = f" ({' … '.join(f'{end:.3f}' for end in sorted(ends))})" if ends else ""
    return f"{abs(found.mean):.3f}{inside}"


def family_tables(
    families: Mapping[str, Sequence[Outcome]], lengths: Mapping[str, str]
) -> list[Block]:
    """The comparisons of every family under one heading."""
    if not families:
        return []
    text = (
        "Test loss in nats, fresh seeds, registered before the runs; Student's 95 % interval over "
        "pairs. *Better* and *worse*: Holm's p below 0.05 over all comparisons of the family; "
        "*suggestive*: the interval alone excludes 0. Commits, seed by seed: "
        "[families](families.md)."
    )
    blocks: list[Block] = [Heading("Confirmatory families"), Text(text)]
    for name, outcomes in families.items():
        blocks += [Text(f"[{name}](families/{name}.toml), {lengths[name]}:"), _table(outcomes)]
    return blocks


def _table(outcomes: Sequence[Outcome]) -> Grid:
    """A family's comparisons; before the last run, how many pairs there are and no number."""
    rows = []
    for outcome in outcomes:
        pair = (outcome.comparison.a, outcome.comparison.b)
        found = outcome.contrast.test if outcome.contrast is not None else None
        rows.append(
            [
                QUESTIONS.get(pair, outcome.comparison.name),
                f"{NAMES.get(pair[0], pair[0])} − {NAMES.get(pair[1], pair[1])}",
                str(outcome.pairs),
                NATS.interval(found.interval if found else None),
                p_value(outcome.p_holm if found else None),
                outcome.verdict,
            ]
        )
    columns = ["question", "difference", "pairs", "nats", "p (Holm)", "verdict"]
    return Grid(columns, rows, ("question", "difference", "verdict"))
