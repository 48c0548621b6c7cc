"""Every ``gfsa train`` that the documentation shows can be typed: its runs are accepted."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from gfsa_experiments.commands.train import runs_of_plan
from gfsa_experiments.runs.run import Run
from support.snippets import commands_of

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# they say where, not what
_PLACES = ("--data-dir", "--results", "--out", "--jobs", "--device")


def runs_of(words: list[str], folder: Path) -> list[Run]:
    words = list(words)
    for flag in _PLACES:
        if flag in words:
            del words[words.index(flag) : words.index(flag) + 2]
    plan = folder / "plan.txt"
    plan.write_text(shlex.join(words))
    return runs_of_plan(plan)


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_commands_are_accepted(page: Path, tmp_path: Path) -> None:
    for words in commands_of(page.read_text(encoding="utf-8")):
        if words[0] not in ("--list", "--plan"):
            assert runs_of(words, tmp_path), words
