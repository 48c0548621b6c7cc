"""``--contrast`` of lines of families: registered comparisons, any others, and what is refused."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
from scipy.stats import ttest_rel
from typer.testing import CliRunner

from gfsa import cli
from gfsa_experiments.results.families import Family, read_family
from gfsa_experiments.results.pages import p_value
from gfsa_experiments.runs.row import append_rows
from support.result_rows import rows_of_family

TEXT = """
registered = 2026-11-16T00:00:00Z
recipe = "support.toy_recipe"
metric = "accuracy"
seeds = "100-103"
settings = "epochs=3"

[lines]
gfsa = "gfsa K=2 filter_lr=1e-2"
gain = "gfsa learn=w1"
plain = "plain"
longer = "plain epochs=4"

[[comparison]]
a = "gfsa"
b = "plain"

[[comparison]]
a = "gfsa"
b = "gain"

[[comparison]]
a = "gfsa"
b = "longer"
"""
VALUES = {
    "gfsa": [60.0, 61.0, 62.0, 63.5],
    "gain": [55.0, 55.0, 56.5, 57.0],
    "plain": [50.0, 51.5, 52.0, 53.0],
    "longer": [59.0, 61.5, 61.0, 64.0],
}


@pytest.fixture
def family(tmp_path: Path) -> Family:
    path = tmp_path / "families" / "toy.toml"
    path.parent.mkdir()
    path.write_text(TEXT)
    return read_family(path)


@pytest.fixture
def folder(family: Family) -> Path:
    folder = family.path.parents[1]
    append_rows(folder / "toy.csv", rows_of_family(family, VALUES))
    return folder


def shown(folder: Path, *arguments: str) -> list[dict[str, str]]:
    """The rows of the tables that the command prints."""
    done = CliRunner().invoke(cli.build(), ["results", "--dir", str(folder), *arguments])
    assert done.exit_code == 0, done.output
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    names, _, *found = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return [dict(zip(names, cells, strict=True)) for cells in found]


def refusal(folder: Path, *arguments: str) -> str:
    done = CliRunner().invoke(cli.build(), ["results", "--dir", str(folder), *arguments])
    assert done.exit_code == 1
    return done.stderr


def test_a_comparison_that_is_not_registered_is_exploratory(folder: Path) -> None:
    (row,) = shown(folder, "--family", "toy", "--contrast", "gain - plain")
    p = ttest_rel(VALUES["gain"], VALUES["plain"]).pvalue
    # far below 0.05, and still no verdict
    assert (row["kind"], row["reading"]) == ("exploratory", "suggestive")
    assert (row["p"], row["p (Holm)"]) == (p_value(p), "–")
    # differences 5, 3.5, 4.5 and 4
    assert row["difference"].startswith("+4.25 (")


def test_a_registered_comparison_keeps_holms_p_and_its_verdict(folder: Path) -> None:
    there, back = shown(
        folder, "--family", "toy", "--contrast", "gfsa - plain", "--contrast", "plain − gfsa"
    )
    p = 3 * ttest_rel(VALUES["gfsa"], VALUES["plain"]).pvalue
    assert (there["kind"], there["reading"]) == ("registered in toy", "better")
    assert (back["kind"], back["reading"]) == ("registered in toy", "worse")
    assert there["p (Holm)"] == back["p (Holm)"] == p_value(p)
    assert (there["difference"][0], back["difference"][0]) == ("+", "−")


def test_a_recipe_whose_rows_are_all_of_families_can_be_asked(folder: Path) -> None:
    """There is no exploratory table, and the families of the recipe answer."""
    for asked in ((), ("--recipe", "toy"), ("--task", "toy")):
        (row,) = shown(folder, *asked, "--contrast", "gain - longer")
        assert (row["a"], row["b"], row["kind"]) == ("gain", "longer", "exploratory")
    # with other settings it is another table; its lines are compared there, too
    family = read_family(folder / "families" / "toy.toml")
    explored = [
        dataclasses.replace(row, seed=row.seed - 100) for row in rows_of_family(family, VALUES)
    ]
    append_rows(folder / "toy.csv", explored)
    kinds = [row["kind"] for row in shown(folder, "--contrast", "gfsa K=2 - plain epochs=3.0")]
    assert kinds == ["exploratory", "registered in toy"]


def test_nothing_is_compared_before_the_last_run(family: Family) -> None:
    folder = family.path.parents[1]
    append_rows(folder / "toy.csv", rows_of_family(family, VALUES)[:-1])
    said = refusal(folder, "--family", "toy", "--contrast", "gfsa - plain")
    assert "the family toy is not complete" in said
    assert "no task has both lines" in refusal(folder, "--contrast", "gfsa - plain")


def test_a_registered_comparison_with_a_failed_run_has_no_number(family: Family) -> None:
    folder = family.path.parents[1]
    broken = [
        dataclasses.replace(row, test=math.nan)
        if row.method == "plain" and row.seed == 101
        else row
        for row in rows_of_family(family, VALUES)
    ]
    append_rows(folder / "toy.csv", broken)
    registered, other = shown(
        folder, "--family", "toy", "--contrast", "gfsa - plain", "--contrast", "gain - plain"
    )
    assert registered["difference"] == "–"
    assert registered["reading"] == "not finite in 1 of 4 pairs: no verdict"
    assert (other["kind"], other["pairs"]) == ("exploratory", "3")
