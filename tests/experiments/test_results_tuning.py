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
    gain = own.options.str.contains("learn=w1")
    best = {
        "plain": own[own.method == "plain"].valid.min(),
        "GFSA": own[(own.method == "gfsa") & ~gain].valid.min(),
        "degree 1": own[own.method == "degree1"].valid.min(),
        "twicing": own[own.method == "twicing"].valid.min(),
        "gain only": own[gain].valid.min(),
    }
    listed = ", ".join(f"{name} {best[name]:.1f}" for name in list(best)[:-1])
    assert f"{listed} and gain only {best['gain only']:.1f}" in page
    assert f"a lead of {best['plain'] - best['GFSA']:.1f}" in page
    first = own[own.settings.str.contains(" lr=0.001 ") & ~own.settings.str.contains("gain_lr")]
    first = first[first.settings.str.contains("warmup=0.05")]
    (plain,) = first[first.method == "plain"].valid
    (gfsa,) = first[(first.method == "gfsa") & (first.options == "filter_lr=0.01")].valid
    assert f"from {plain:.1f} at 1e-3 to {best['plain']:.1f} at 2e-3" in page
    assert f"which was {plain - gfsa:.1f} at 1e-3" in page
