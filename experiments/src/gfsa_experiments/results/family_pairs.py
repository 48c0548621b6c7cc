"""Any two lines of a complete family against each other, whether it compares them or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gfsa_experiments.results.contrasts import Contrast, contrast
from gfsa_experiments.results.families import Family
from gfsa_experiments.results.family_summary import FamilyLine, Judged, contrast_scale, lines_of
from gfsa_experiments.results.line_pairs import has_words, refuse_other_data, sides
from gfsa_experiments.results.number_format import contrast_cells, p_value
from gfsa_experiments.results.verdicts import Outcome

EXPLORATORY = "exploratory"


@dataclass(frozen=True)
class FamilyPair:
    family: Family
    a: FamilyLine
    b: FamilyLine
    contrast: Contrast | None
    """None where a registered comparison has a run without a finite number."""
    registered: Outcome | None
    """The family's own comparison of the two, in whichever order."""

    @property
    def kind(self) -> str:
        """``registered``, ``registered (as b − a)`` or ``exploratory``."""
        if self.registered is None:
            return EXPLORATORY
        name = self.registered.comparison.name
        return (
            "registered" if name == f"{self.a.name} − {self.b.name}" else f"registered (as {name})"
        )

    def cells(self) -> dict[str, str]:
        """A row of a table."""
        own = contrast_cells(self.contrast, contrast_scale(self.contrast))
        recipe, task = self.a.task
        arrow = "" if self.a.line.rows.higher_is_better.iloc[0] else " ↓"
        p_holm, reading = None, own["reading"]
        if self.registered is not None:
            # of two lines in the other order p is the same, and the verdict the opposite
            turned = replace(self.registered, contrast=self.contrast)
            p_holm, reading = turned.p_holm, turned.verdict
        return {
            "family": self.family.name,
            "task": f"{recipe}: {task}, {self.a.metric}{arrow}",
            "a": self.a.name,
            "b": self.b.name,
            "kind": self.kind,
            "pairs": str(len(self.contrast.test.seeds) if self.contrast else 0),
            **{name: own[name] for name in ("difference", "error reduction", "better", "p")},
            "p (Holm)": p_value(p_holm),
            "reading": reading,
            **{name: own[name] for name in ("on valid", "at", "one commit")},
        }


def find_family_pairs(judged: Sequence[Judged], text: str) -> list[FamilyPair]:
    """``A - B`` of every complete family that has both, each by its name there or by its words."""
    of_a, of_b = sides(text)
    found = []
    for family, outcomes in judged:
        lines = lines_of(outcomes)
        for a in named_lines(lines, of_a):
            for b in named_lines(lines, of_b):
                pair = _pair(family, outcomes, a, b)
                if pair is not None:
                    found.append(pair)
    return found


def named_lines(lines: Sequence[FamilyLine], text: str) -> list[FamilyLine]:
    """The lines of this name; without one, those with these words and the fewest others."""
    exact = [own for own in lines if own.name == text]
    if exact:
        return exact
    found = [own for own in lines if has_words(own.line, own.key.settings, text)]
    sizes = [len(f"{own.line.options} {own.key.settings}".split()) for own in found]
    return [own for own, size in zip(found, sizes, strict=True) if size == min(sizes)]


def _pair(
    family: Family, outcomes: Sequence[Outcome], a: FamilyLine, b: FamilyLine
) -> FamilyPair | None:
    """None if the two have no task, or no seed, in common."""
    if a is b or (a.task, a.metric) != (b.task, b.metric):
        return None
    refuse_other_data(a.line, b.line)
    compared = contrast(a.line.rows, b.line.rows)
    own = next(
        (one for one in outcomes if _keys(one) in ((a.keys, b.keys), (b.keys, a.keys))), None
    )
    if own is not None:
        # a pair that failed leaves a registered comparison without a number
        compared = None if own.contrast is None else compared
        return FamilyPair(family, a, b, compared, own)
    return None if compared is None else FamilyPair(family, a, b, compared, None)


def _keys(outcome: Outcome) -> tuple[object, object]:
    a, b = (tuple(outcome.comparison.keys(x)) for x in (outcome.comparison.a, outcome.comparison.b))
    return a, b
