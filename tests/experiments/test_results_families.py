"""Families: what a file may say, what is refused, and when there is a verdict."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import ttest_rel
from typer.testing import CliRunner

from gfsa import cli
from gfsa_experiments.commands.train import runs_of_plan
from gfsa_experiments.results.families import (
    Outcome,
    outcomes,
    read_families,
    read_family,
    refuse_unregistered,
)
from gfsa_experiments.results.report import marks
from gfsa_experiments.results.statistics import holm
from gfsa_experiments.results.tables import frame_of
from gfsa_experiments.runs.row import Row, append_rows

TEXT = """
title = "A toy"
registered = 2026-11-16T00:00:00Z
recipe = "support.toy_recipe"
metric = "accuracy"
seeds = "100-103"
settings = "epochs=3 lens=true"

[lines]
gfsa = "gfsa K=2 filter_lr=1e-2"
degree1 = "degree1 filter_lr=1e-2"
plain = "plain epochs=4"

[[comparison]]
a = "gfsa"
b = "degree1"

[[comparison]]
a = "gfsa"
b = "plain"
"""
VALUES = {
    "gfsa": [60.0, 61.0, 62.0, 63.5],
    "degree1": [50.0, 51.5, 52.0, 53.0],
    "plain": [59.0, 61.5, 61.0, 64.0],
}
NONE = frame_of([])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "families").mkdir()
    return tmp_path


def written(folder: Path, text: str = TEXT) -> Any:
    path = folder / "families" / "toy.toml"
    path.write_text(text)
    return read_family(path)


def rows_of(family: Any, **changes: Any) -> list[Row]:
    """A row for each run of a family, in the order of its comparisons."""
    values: dict[str, Any] = {
        "metric": "accuracy",
        "higher_is_better": True,
        "epochs": 3.0,
        "commit": "abc1234",
        "date": "2026-11-16T01:00:00+00:00",
    }
    recorded = {
        key: Row(**key._asdict(), test=test, **(values | changes))
        for comparison in family.comparisons
        for line, keys in comparison.keys.items()
        for key, test in zip(keys, VALUES[line], strict=True)
    }
    return list(recorded.values())


def judged(family: Any, rows: list[Row]) -> list[Outcome]:
    return outcomes(family, frame_of(rows))


def test_the_families_of_this_repository_are_valid() -> None:
    results = Path(__file__).parents[2] / "results"
    found = {family.name: family for family in read_families(results)}
    assert {"zinc", "cifar10", "stsb"} <= found.keys()
    assert [comparison.name for comparison in found["zinc"].comparisons] == [
        "gfsa − degree1",
        "gfsa − plain",
    ]
    assert found["zinc"].comparisons[0].tasks == {("graph", "zinc graphormer-slim")}
    assert found["stsb"].comparisons[0].keys["plain"][0].settings.split()[-1] == "report=test"


def test_a_file_is_read_and_its_plan_gives_its_runs(folder: Path) -> None:
    family = written(folder)
    assert (family.name, family.title, len(family.keys)) == ("toy", "A toy", 12)
    first = family.comparisons[1]
    assert first.seeds == (100, 101, 102, 103)
    # a line's own setting counts
    assert first.keys["plain"][0].settings == "epochs=4.0"
    assert first.keys["gfsa"][0].settings == "epochs=3.0"
    plan = folder / "plan.txt"
    plan.write_text("\n".join(family.plan))
    assert {run.key() for run in runs_of_plan(plan)} == family.keys


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('recipe = "support.toy_recipe"', 'recipe = "nope"', "there is no recipe 'nope'"),
        ('"gfsa K=2 filter_lr=1e-2"', '"gfsb K=2"', "there is no method 'gfsb'"),
        ("epochs=3", "epoks=3", "epoks"),
        ('"plain epochs=4"', '"plain filter_lr=1"', "filter_lr .none of the methods plain"),
        ('"100-103"', '"99-103"', "fresh ones from 100 on, got 99-103"),
        ('"100-103"', '"100"', "two or more fresh ones"),
        ('b = "plain"', 'b = "other"', "no line 'other' in .lines.; there are gfsa, degree1"),
        ('b = "plain"', 'b = "gfsa"', "a comparison needs two lines"),
        ('b = "plain"', 'b = "degree1"', "listed twice"),
        ('a = "gfsa"\nb = "plain"', 'a = "degree1"\nb = "gfsa"', "listed twice"),
        ('metric = "accuracy"', "", "lacks metric"),
        ('title = "A toy"', 'direction = "up"', "the file has direction, which it cannot have"),
        (
            'b = "plain"',
            'b = "plain"\nalpha = 0.1',
            r"a \[\[comparison\]\] has alpha, which it cannot have",
        ),
        ("2026-11-16T00:00:00Z", "2026-11-16", "registered is a time with its zone"),
        ('title = "A toy"', "withdrawn = true", "withdrawn is the reason in words, got True"),
        ('title = "A toy"', 'withdrawn = " "', "withdrawn is the reason in words, got ' '"),
        ("[[comparison]]", "[[other]]", "the file has other, which it cannot have"),
        ("epochs=3 lens=true", "epochs=3 epochs=5", "epochs given twice"),
        ("K=2 filter_lr=1e-2", "K=2 K=3", "K given twice"),
        ('title = "A toy"', "title = ", "toy.toml: .*[Ii]nvalid"),
    ],
)
def test_what_a_file_may_not_say(folder: Path, old: str, new: str, message: str) -> None:
    assert old in TEXT
    with pytest.raises(ValueError, match=rf"(?s)toy\.toml: .*{message}|{message}"):
        written(folder, TEXT.replace(old, new))


def refusal(family: Any, rows: list[Row], tuning: list[Row] | None = None) -> str:
    with pytest.raises(ValueError, match=r"toy\.toml: gfsa − degree1: ") as caught:
        refuse_unregistered([family], frame_of(rows), frame_of(tuning or []))
    return str(caught.value)


def test_seeds_that_were_seen_are_refused(folder: Path) -> None:
    family = written(folder)
    good = rows_of(family)
    refuse_unregistered([family], frame_of(good), NONE)
    early = [*good[1:], dataclasses.replace(good[0], date="2026-11-15T23:00:00+00:00")]
    assert "seed 100 was recorded at 2026-11-15T23:00:00+00:00" in refusal(family, early)
    # recorded after the registration, begun before it
    begun = [*good[1:], dataclasses.replace(good[0], seconds=3601.0)]
    assert "at 2026-11-16T01:00:00+00:00 after 3601 s of training" in refusal(family, begun)
    # also where a later run replaced it, and whatever the method was
    assert "was recorded at" in refusal(family, [*good, early[-1]])
    other = dataclasses.replace(early[-1], method="twicing", options="", settings="lr=1")
    assert "was recorded at" in refusal(family, [*good, other])
    assert "seed 100 was used in tuning" in refusal(family, good, [good[0]])
    # another seed, or another task, tells nothing
    unseen = [dataclasses.replace(other, seed=3), dataclasses.replace(other, task="another")]
    refuse_unregistered([family], frame_of([*good, *unseen]), frame_of(unseen))


def test_a_run_is_not_repeated(folder: Path) -> None:
    family = written(folder)
    rows = [*rows_of(family), dataclasses.replace(rows_of(family)[0], test=99.0)]
    message = r"gfsa K=2 filter_lr=0\.01 with seed 100 is recorded more"
    with pytest.raises(ValueError, match=message):
        refuse_unregistered([family], frame_of(rows), NONE)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("registered = 2026-11-16T00:00:00Z", "", "the family is planned; register and commit it"),
        # one that was run cannot be taken back, whatever its rows say
        ('title = "A toy"', 'withdrawn = "too dear"', "withdrawn; one that was run stays"),
        ('metric = "accuracy"', 'metric = "f1"', "its metric is f1"),
    ],
)
def test_rows_of_an_open_family_are_refused(folder: Path, old: str, new: str, message: str) -> None:
    family = written(folder, TEXT.replace(old, new))
    refuse_unregistered([family], NONE, NONE)
    assert message in refusal(family, rows_of(family)[:1])


def test_verdicts_are_holms_over_the_family(folder: Path) -> None:
    family = written(folder)
    degree1, plain = judged(family, rows_of(family))
    ps = [ttest_rel(VALUES["gfsa"], VALUES[name]).pvalue for name in ("degree1", "plain")]
    assert (degree1.contrast.test.p, plain.contrast.test.p) == pytest.approx(ps)  # type: ignore[union-attr]
    assert (degree1.p_holm, plain.p_holm) == pytest.approx(holm(ps))
    # differences 10, 9.5, 10, 10.5 and 1, −0.5, 1, −0.5
    assert (degree1.verdict, plain.verdict) == ("better", "not shown")
    assert degree1.contrast.budget == "equal epochs"  # type: ignore[union-attr]


def test_what_one_interval_excludes_may_still_be_no_verdict(folder: Path, monkeypatch: Any) -> None:
    # p = 0.034 alone, 0.068 after the correction
    monkeypatch.setitem(VALUES, "degree1", [58.0, 58.2, 61.4, 61.8])
    first, second = judged(written(folder), rows_of(written(folder)))
    assert first.contrast is not None
    assert first.contrast.test.p is not None
    assert first.contrast.test.p < 0.05 < first.p_holm  # type: ignore[operator]
    assert (first.verdict, second.verdict) == ("suggestive", "not shown")


def without(rows: list[Row], count: int) -> list[Row]:
    return [row for row in rows if row.method != "plain" or row.seed < 104 - count]


def test_no_peeking(folder: Path) -> None:
    """While one run is missing, no comparison of the family has a number or a verdict."""
    family = written(folder)
    found = judged(family, without(rows_of(family), 1))
    assert [outcome.missing for outcome in found] == [0, 1]
    assert [(outcome.contrast, outcome.p_holm) for outcome in found] == [(None, None)] * 2
    assert found[1].verdict == "1 of 4 pairs missing: no verdict"
    assert marks([], [(family, found)]) == []
    assert found[0].verdict == "other pairs of the family missing or unusable: no verdict"


@pytest.mark.parametrize("commit", ["def5678", "abc1234-dirty", ""])
def test_a_pair_is_of_one_clean_commit(folder: Path, commit: str) -> None:
    family = written(folder)
    rows = rows_of(family)
    rows = [dataclasses.replace(row, commit=commit) if row.seed == 101 else row for row in rows]
    mixed = [
        first if first.method == "gfsa" else second
        for first, second in zip(rows_of(family), rows, strict=True)
    ]
    why = {"def5678": "of two commits", "": "without a commit"}.get(commit, "with local changes")
    found = judged(family, mixed)
    assert [(outcome.missing, outcome.unusable) for outcome in found] == [(0, {why: 1})] * 2
    assert found[0].contrast is None
    assert found[0].verdict.startswith(f"1 {why}, of 4 pairs: no verdict. A run of a family is not")
    # another commit for both runs of a pair is one commit
    same = [outcome.unusable for outcome in judged(family, rows)]
    assert same == [{} if commit == "def5678" else {why: 1}] * 2


def test_runs_on_other_data_are_no_pair(folder: Path) -> None:
    family = written(folder)
    rows = [dataclasses.replace(r, data=f"1+1+1 {r.method[:5]}") for r in rows_of(family)]
    assert [outcome.unusable for outcome in judged(family, rows)] == [{"on two data sets": 4}] * 2
    twice = rows_of(family, data="1+1+1 a") + rows_of(family, data="1+1+1 b")
    with pytest.raises(ValueError, match="must all be on the same data"):
        judged(family, twice)
    # both runs of a seed on the same data, and those of the next seed on other data
    by_seed = [dataclasses.replace(r, data=f"1+1+1 {r.seed}") for r in rows_of(family)]
    with pytest.raises(ValueError, match=r"all be on the same data, these are on 1\+1\+1 100; 1"):
        judged(family, by_seed)
    unknown = [dataclasses.replace(r, data="1+1+1 a" * (r.seed > 100)) for r in rows_of(family)]
    assert [outcome.unusable for outcome in judged(family, unknown)] == [{}] * 2


def test_a_family_with_unusable_pairs_is_neither_complete_nor_not_run(folder: Path) -> None:
    written(folder)
    append_rows(folder / "toy.csv", rows_of(written(folder), commit="abc1234-dirty"))
    text = text_of(folder)
    assert "not run" not in text
    assert "| GFSA − plain | 0 | – | – | – | 4 with local changes, of 4" in text


def test_a_run_that_broke_down_leaves_no_verdict(folder: Path) -> None:
    family = written(folder)
    rows = [
        dataclasses.replace(row, test=math.nan) if (row.method, row.seed) == ("plain", 102) else row
        for row in rows_of(family)
    ]
    degree1, plain = judged(family, rows)
    assert plain.verdict == "not finite in 1 of 4 pairs: no verdict"
    # it still counts among the comparisons
    p = ttest_rel(VALUES["gfsa"], VALUES["degree1"]).pvalue
    assert degree1.p_holm == pytest.approx(2 * p)


def text_of(folder: Path, *arguments: str) -> str:
    done = CliRunner().invoke(cli.build(), ["results", "--dir", str(folder), *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_command_prints_a_family_and_keeps_its_rows_out_of_the_tables(folder: Path) -> None:
    family = written(folder)
    rows = rows_of(family)
    explored = [dataclasses.replace(row, seed=row.seed - 100) for row in rows]
    append_rows(folder / "toy.csv", [*without(rows, 3), *explored])
    text = text_of(folder)
    # the first page has a sentence for a family that lacks runs, --family its table
    assert "gfsa − degree1; gfsa − plain, 4 seeds" in text
    assert "3 of 4 pairs missing: no verdict." in text
    row = f"| gfsa − plain | accuracy | 1 |{' – |' * 3} 3 of 4 pairs missing: no verdict |"
    assert row in text_of(folder, "--family", "toy")
    # four seeds of gfsa, not eight: those of the family are not looked at
    assert "| gfsa K=2 filter_lr=0.01 | 4 | 61.6 ± 1.5 |" in text
    append_rows(folder / "toy.csv", [row for row in rows if row not in without(rows, 3)])
    text = text_of(folder, "--family", "toy")
    assert "| gfsa − degree1 | accuracy | 4 | +10.00 (+9.35 … +10.65) |" in text
    assert "| better | equal epochs |" in text


def test_a_family_before_its_first_run(folder: Path) -> None:
    written(folder)
    plan = folder / "plan.txt"
    assert "gfsa − degree1" in text_of(folder, "--family", "toy", "--plan", plan)
    assert "--seeds 100-103" in plan.read_text(encoding="utf-8")
    assert "planned" not in (text := text_of(folder))
    assert "4 seeds, not run." in text
