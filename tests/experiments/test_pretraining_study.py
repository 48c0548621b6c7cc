"""Which runs the study of pretraining is about: those of plans and family, on one set of data."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
import pytest

from gfsa_experiments.results.page_blocks import to_markdown
from gfsa_experiments.results.pretraining.arms import arm_of
from gfsa_experiments.results.pretraining.gap import cells
from gfsa_experiments.results.pretraining.page import detail_blocks, first_blocks
from gfsa_experiments.results.pretraining.speeds import speeds_of
from gfsa_experiments.results.pretraining.study import BEST_RATES, read_study
from gfsa_experiments.tasks.pretrain.recipe import PretrainConfig
from support.pretraining_runs import FAMILY, add_family_runs, study_folder


@pytest.fixture(autouse=True)
def _without_sketches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether methods fit models is tested with the plans; here it would take most of the time."""
    monkeypatch.setattr(PretrainConfig, "sketch", lambda config: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return study_folder(tmp_path)


def test_arms_have_names() -> None:
    assert arm_of("plain", "", "lr=0.002") == "plain"
    assert arm_of("plain", "", "lr=0.002 gate=True") == "gated"
    assert arm_of("plain", "", "depth=9") == "plain, 9 layers"
    assert arm_of("gfsa", "learn=w1 filter_lr=0.1", "") == "gain only"
    assert arm_of("gfsa", "layers=upper filter_lr=0.1", "") == "GFSA, upper layers"
    assert arm_of("degree1", "filter_lr=0.1", "lr=0.002") == "degree 1"


def test_the_plans_choose_the_runs(folder: Path) -> None:
    study = read_study(folder)
    assert len(study.runs) == 12
    assert set(study.runs["size"]) == {"15M"}
    assert sorted(study.runs.tokens.unique()) == [n * 32 * 1024 for n in (480, 1600, 4800)]
    assert study.runs.parameters.unique().tolist() == [15_000_000]
    (sentence,) = study.missing
    assert sentence.startswith("The family pretrain has 0 of its 4 runs")
    page = to_markdown([*first_blocks(study), *detail_blocks(study, {})])
    assert "| 15M | 157M | 10.5 | 2 | 2.000 | −0.100 |" in page


def test_a_family_is_not_read_before_its_last_run(folder: Path) -> None:
    add_family_runs(folder, ["plain"])
    study = read_study(folder)
    assert study.runs.seed.max() < 100
    assert "has 2 of its 4 runs; nothing is read from them before the last" in study.missing[0]
    add_family_runs(folder, ["gfsa"])
    study = read_study(folder)
    assert study.missing == []
    # at its length the family's fresh seeds alone count
    found = {cell.tokens: cell for cell in cells(study.runs, "GFSA")}
    assert found[4800 * 32 * 1024].seeds == (100, 101)
    assert found[4800 * 32 * 1024].mean == pytest.approx(-0.5)
    assert found[1600 * 32 * 1024].seeds == (0, 1)


def test_a_family_at_other_rates_gives_verdicts_and_no_runs_by_length(folder: Path) -> None:
    own = FAMILY.replace("epochs=3", "epochs=3 lr=4e-3").replace("100-101", "400-401")
    (folder / f"families/{BEST_RATES}.toml").write_text(own)
    add_family_runs(folder, ["plain", "gfsa"], BEST_RATES)
    study = read_study(folder)
    assert [outcome.pairs for outcome in study.families[BEST_RATES]] == [2]
    assert study.runs.seed.max() < 100


def test_a_family_with_local_changes_is_not_read(folder: Path) -> None:
    add_family_runs(folder, ["plain", "gfsa"])
    table = (folder / "pretrain.csv").read_text()
    (folder / "pretrain.csv").write_text(table.replace(",abc,", ",abc-dirty,"))
    study = read_study(folder)
    assert study.runs.seed.max() < 100
    assert "some pairs do not count: `gfsa results --family pretrain` says why" in study.missing[0]


def test_runs_on_other_data_are_not_compared(folder: Path) -> None:
    table = (folder / "tuning/pretrain.csv").read_text()
    (folder / "tuning/pretrain.csv").write_text(table.replace("10+10+10 abc", "9+9+9 def", 3))
    with pytest.raises(ValueError, match=r"on different data \(10\+10\+10 abc; 9\+9\+9 def\)"):
        read_study(folder)


@pytest.mark.parametrize("name", ["pretrain-scaling-15m.txt", "pretrain-stability.txt"])
def test_of_a_run_on_two_data_sets_none_is_chosen(folder: Path, name: str) -> None:
    """Not the later one either, which would hide the other."""
    (folder / "plans/pretrain-scaling-15m.txt").rename(folder / "plans" / name)
    table = folder / "tuning/pretrain.csv"
    header, rows = table.read_text().split("\n", 1)
    again = rows.replace("10+10+10 abc", "9+9+9 def")
    table.write_text(f"{header}\n{rows}{again}")
    with pytest.raises(ValueError, match=rf"{name}: .*\(10\+10\+10 abc; 9\+9\+9 def\)"):
        read_study(folder)


def test_what_diverged_is_said(folder: Path) -> None:
    table = pd.read_csv(folder / "tuning/pretrain.csv", keep_default_na=False)
    chosen = (table.method == "gfsa") & (table.seed == 1) & (table.steps == 480)
    table.loc[chosen, "test"] = math.nan
    table.to_csv(folder / "tuning/pretrain.csv", index=False, na_rep="nan")
    study = read_study(folder)
    assert "15M GFSA, seed 1: the run diverged and is left out." in study.missing
    assert cells(study.runs, "GFSA")[0].seeds == (0,)


def test_speeds_are_those_of_runs_alone() -> None:
    rows = pd.DataFrame(
        [
            {"jobs": 1, "others": "mfu=0.2 tokens_per_second=2000000", "settings": "batch_size=32"},
            {"jobs": 5, "others": "tokens_per_second=7", "settings": "batch_size=32"},
            {"jobs": 1, "others": "tokens_per_second=5", "settings": "residual=bf16"},
        ]
    ).assign(
        recipe="pretrain",
        task="techdocs qwen3-15m",
        method="plain",
        options="",
        steps=100,
        seed=0,
        parameters=100,
        added=0,
        test=1.0,
    )
    assert speeds_of(rows) == {("15M", "plain", 32): 2e6}
