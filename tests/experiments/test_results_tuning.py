"""The table of the runs by which arms were tuned, and the families of a recipe on its page."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
import pytest

from gfsa_experiments.commands.train import runs_of_plan
from gfsa_experiments.results.families import read_families
from gfsa_experiments.results.family_summary import of_recipe
from gfsa_experiments.results.load_rows import read_folder, read_folder_if_any
from gfsa_experiments.results.page_blocks import to_markdown
from gfsa_experiments.results.tuning_table import tuning_blocks
from gfsa_experiments.results.verdicts import outcomes

RESULTS = Path(__file__).parents[2] / "results"
Runs = dict[tuple[str, str, str], list[float]]


def rows(runs: Runs, higher: bool = False) -> pd.DataFrame:
    """By method, options and settings: a result on valid for each seed."""
    return pd.DataFrame(
        [
            {"recipe": "toy", "task": "t", "data": "d", "metric": "loss", "method": method}
            | {"options": options, "settings": settings, "seed": seed, "valid": value}
            | {"higher_is_better": higher}
            for (method, options, settings), values in runs.items()
            for seed, value in enumerate(values)
        ]
    )


RUNS: Runs = {
    ("gfsa", "filter_lr=0.01", "lr=0.001 warmup=0.05"): [1.25],
    ("plain", "", "lr=0.001 warmup=0.05"): [2.0],
    ("plain", "", "lr=0.002 warmup=0.05"): [1.5],
    ("plain", "", "lr=0.002 gain_lr=0.1 warmup=0.05"): [1.75],
    ("gfsa", "filter_lr=0.1", "lr=0.001 warmup=0.05"): [math.nan],
    ("gfsa", "learn=w1 filter_lr=0.01", "warmup=0.05"): [1.625],
}


def test_each_arms_best_is_bold_and_beside_plains() -> None:
    page = to_markdown(tuning_blocks(rows(RUNS)))
    lines = [line for line in page.splitlines() if line.startswith("|")]
    assert lines[0] == "| lr | default | 0.001 | 0.002 | best − plain's |"
    assert lines[2:] == [
        "| plain | – | 2.000 | **1.500** | – |",
        "| plain gain_lr=0.1 | – | – | 1.750 | – |",
        "| gfsa filter_lr=0.01 | – | **1.250** | – | −0.250 |",
        # a run that broke down
        "| gfsa filter_lr=0.1 | – | – | – | – |",
        "| gfsa learn=w1 filter_lr=0.01 | **1.625** | – | – | +0.125 |",
    ]
    assert "lower is better, seed 0;" in page
    assert "[6 rows](tuning/toy.csv)" in page
    assert tuning_blocks(rows(RUNS)[:0]) == []


def test_the_mean_over_seeds_counts_and_higher_may_be_better() -> None:
    two: Runs = {
        ("plain", "", "lr=0.001"): [1.0, 3.0],
        ("plain", "", "lr=0.002"): [2.5, 2.5],
        ("gfsa", "", "lr=0.001"): [3.0, 4.0],
    }
    page = to_markdown(tuning_blocks(rows(two, higher=True)))
    assert "| plain | 2.000 | **2.500** | – |" in page
    assert "| gfsa | **3.500** | – | +1.000 |" in page
    assert "higher is better, 2 seeds" in page


@pytest.mark.parametrize("recipe", ["causal_lm", "glue", "graph", "image"])
def test_a_page_names_the_families_of_its_recipe(recipe: str) -> None:
    runs = read_folder(RESULTS).rows
    judged = [(family, outcomes(family, runs)) for family in read_families(RESULTS)]
    said = to_markdown(of_recipe(judged, recipe))
    assert said.strip() in (RESULTS / f"{recipe}.md").read_text("utf-8")
    for family, found in judged:
        own = recipe in {task for o in found for task, _ in o.comparison.tasks}
        assert (f"families/{family.name}.toml" in said) == own
        if own and all(outcome.is_complete for outcome in found):
            assert all(f"{o.comparison.name}: {o.verdict}" in said for o in found)
    assert of_recipe(judged, "lra") == []


def test_what_is_written_of_wikitext2_is_that_of_the_rows() -> None:
    """Prose of results/causal_lm.md about the tuning."""
    page = " ".join((RESULTS / "causal_lm.md").read_text("utf-8").split())
    found = read_folder_if_any(RESULTS / "tuning").rows
    own = found[found.recipe == "causal_lm"]
    keys = {run.key() for run in runs_of_plan(RESULTS / "plans/causal_lm-tuning.txt")}
    assert f"{len(own)} of its {len(keys)} runs" in page
    best = best_by_arm(own)
    listed = ", ".join(f"{name} {best[name]:.1f}" for name in ("plain", "GFSA", "degree 1"))
    others = f"twicing {best['twicing']:.1f} and gain only {best['gain only']:.1f}"
    assert f"The best runs are {listed}, {others}" in page
    short = best_by_arm(own[own.settings.str.contains("warmup=0.05")])
    usual = own.settings.str.contains(" lr=0.001 .*warmup=0.05")
    usual &= ~own.settings.str.contains("gain_lr") & ~own.options.str.contains("filter_lr=0.1$")
    first = best_by_arm(own[usual])
    plain = [f"{found['plain']:.1f}" for found in (first, short, best)]
    assert "from {} at 1e-3 to {} at 2e-3, and to {} at 4e-3".format(*plain) in page
    leads = [f"{found['plain'] - found['GFSA']:.1f}" for found in (best, first, short)]
    assert "a lead of {} now. It was {} at 1e-3 and {} at each arm's best".format(*leads) in page
    leads = [f"{found['plain'] - found['degree 1']:.1f}" for found in (best, short)]
    assert "Degree 1 has {}, after {};".format(*leads) in page
    leads = [f"{found['degree 1'] - found['GFSA']:.1f}" for found in (best, short)]
    assert "GFSA ends {} below degree 1, after {}.".format(*leads) in page
    falls = [f"{short[name] - best[name]:.1f}" for name in ("plain", "degree 1", "GFSA")]
    assert "by {} for plain, {} for degree 1 and {} for GFSA".format(*falls) in page


def best_by_arm(own: pd.DataFrame) -> dict[str, float]:
    """The lowest perplexity on valid; filters that learn their gain alone are an arm."""
    names = {"gfsa": "GFSA", "degree1": "degree 1"}
    arms = own.method.replace(names).mask(own.options.str.contains("learn=w1"), "gain only")
    return own.groupby(arms).valid.min().to_dict()
