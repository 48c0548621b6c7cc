"""What pages say of a family beside its verdicts: valid, coefficients, GPU seconds, commits."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gfsa import cli
from gfsa_experiments.results.families import Family, outcomes, read_family
from gfsa_experiments.results.pages import to_markdown
from gfsa_experiments.results.report import family_section, verdicts
from gfsa_experiments.results.tables import latest
from gfsa_experiments.runs.row import Row, append_rows
from support.result_rows import row, rows_of_family

TEXT = """
title = "A toy"
registered = 2026-11-16T00:00:00Z
recipe = "support.toy_recipe"
metric = "accuracy"
seeds = "100-102"
settings = "epochs=3"

[lines]
gfsa = "gfsa filter_lr=1e-2"
gain = "gfsa learn=w1"
plain = "plain epochs=4"

[[comparison]]
a = "gfsa"
b = "plain"

[[comparison]]
a = "gfsa"
b = "gain"
"""
TEST = {"gfsa": [60.0, 61.0, 62.5], "gain": [57.0, 58.2, 58.0], "plain": [55.0, 57.0, 57.0]}
FIRST = "| [toy](families/toy.toml): A toy | GFSA − plain |"
COEFFICIENTS = {
    "gfsa": ["-0.2 1.0 0.4", "0.1 1.0 0.4", "-0.2 1.0 0.4"],
    "gain": ["0.0 1.5"] * 3,
    "plain": [""] * 3,
}
SECONDS = {"gfsa": 60.0, "gain": 50.0, "plain": 40.0}


@pytest.fixture
def family(tmp_path: Path) -> Family:
    path = tmp_path / "toy.toml"
    path.write_text(TEXT)
    return read_family(path)


def rows_of(family: Family) -> list[Row]:
    """A row for each run, two runs at once; on valid each number is 1 lower, those of gfsa 2."""
    return rows_of_family(
        family,
        TEST,
        lambda line, at: {
            "valid": TEST[line][at] - (2 if line == "gfsa" else 1),
            "coefficients": COEFFICIENTS[line][at],
            "seconds": SECONDS[line],
            "jobs": 2,
            "device": "NVIDIA H200",
        },
    )


def pages(family: Family, rows: list[Row]) -> tuple[str, str]:
    """The verdicts of all families, and this one by itself."""
    found = outcomes(family, latest(rows).rows)
    return to_markdown(verdicts([(family, found)])), to_markdown(family_section(family, found))


def row_of(page: str, first: str) -> dict[str, str]:
    """The cells of the row that begins like this, by the names of their columns."""
    lines = page.splitlines()
    (at,) = [at for at, line in enumerate(lines) if line.startswith(first)]
    above = at
    while above and lines[above - 1].startswith("|"):
        above -= 1
    names, values = ([c.strip() for c in lines[i].strip("|").split("|")] for i in (above, at))
    return dict(zip(names, values, strict=True))


def test_nothing_is_shown_of_a_family_that_lacks_a_run(family: Family) -> None:
    first, page = pages(family, rows_of(family)[:-1])
    for text in (first, page):
        assert "1 of 3 pairs missing: no verdict" in text
        assert "+" not in text
        assert "GPU seconds" not in text


def test_the_command_gives_no_runs_of_a_withdrawn_family(tmp_path: Path) -> None:
    (tmp_path / "families").mkdir()
    (tmp_path / "families" / "toy.toml").write_text(f'withdrawn = "too dear"\n{TEXT}')
    append_rows(tmp_path / "glue.csv", [row()])
    command = ["results", "--dir", str(tmp_path), "--family", "toy"]
    done = CliRunner().invoke(cli.build(), command)
    assert "withdrawn before any run: too dear." in done.stdout
    assert "gfsa train" not in done.stdout
    done = CliRunner().invoke(cli.build(), [*command, "--plan", str(tmp_path / "runs.txt")])
    assert "the family toy is withdrawn: too dear" in done.stderr
    assert not (tmp_path / "runs.txt").exists()


def test_a_run_that_broke_down_is_named(family: Family) -> None:
    rows = [
        dataclasses.replace(row, test=float("nan"))
        if (row.method, row.seed) == ("plain", 101)
        else row
        for row in rows_of(family)
    ]
    page = pages(family, rows)[1]
    assert row_of(page, "| plain | `")["seeds"] == "2, failed: seed 101"
    assert "- gfsa − plain: not finite in 1 of 3 pairs: no verdict." in page
