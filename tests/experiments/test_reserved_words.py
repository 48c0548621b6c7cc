"""*Better* and *worse* are said of comparisons that a family confirms, in prose as in tables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.prose import ROOT, passages_of

PAGES = [
    ROOT / "README.md",
    ROOT / "docs" / "faq.md",
    *sorted((ROOT / "docs" / "recipes").glob("*.md")),
    *sorted((ROOT / "results").glob("*.md")),
]
RESERVED = re.compile(r"\b(?:better|worse)\b", re.IGNORECASE)
VERDICTS = [
    # in brackets with an interval or Holm's p; that these are right, test_quoted_numbers.py says
    r"\([^()]*(?: … |Holm's p)[^()]*\b(?:better|worse)\b[^()]*\)",
    r"\b(?:better|worse) with Holm's p",
    # the state of a family, made from its rows
    r"\w+ − \w+: (?:better|worse)\b",
]
ABOUT_SOMETHING_ELSE = [
    r"\b(?:higher|lower|positive) is better\b",  # which way a metric goes
    r"\*better\* and \*worse\*",  # what the words mean
    r"nothing is called better or worse",
]
ALLOWED = re.compile("|".join([*VERDICTS, *ABOUT_SOMETHING_ELSE]), re.IGNORECASE)


def misused(text: str) -> list[str]:
    """Where prose has a reserved word without a verdict; tables are read elsewhere."""
    prose = [one.text for one in passages_of("", text) if not one.text.startswith("|")]
    rest = [ALLOWED.sub("", passage) for passage in prose]
    return [
        passage[max(found.start() - 60, 0) : found.end() + 30]
        for passage in rest
        for found in RESERVED.finditer(passage)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_better_and_worse_are_verdicts_in_prose_too(page: Path) -> None:
    """Anything else ends lower or higher, is best, suits …"""
    assert not misused(page.read_text("utf-8"))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("GFSA ends 0.9 lower (0.7 … 1.1; better).", False),
        ("GFSA ends 1.69 lower (Holm's p < 0.001: better).", False),
        ("MAE on the test split, lower is better, 3 seeds.", False),
        ("Family x: gfsa − plain: better; gfsa − gain: worse.", False),
        ("GFSA is better on three seeds (−0.3, suggestive).", True),
        ("Plain is worse with more layers.", True),
        ("It ends lower at one rate (better at 0.001 by 0.030).", True),
        ("| gfsa − plain | better |", False),
    ],
)
def test_what_is_a_verdict(text: str, found: bool) -> None:
    assert bool(misused(text)) == found
