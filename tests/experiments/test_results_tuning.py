"""The table of the runs by which arms were tuned, and the families of a recipe on its page."""

from __future__ import annotations

import math
from itertools import takewhile
from pathlib import Path

import pandas as pd
import pytest
from support.quoted_figures import FIGURES

from gfsa_experiments.commands.train import runs_of_plan
from gfsa_experiments.results.families import is_of
from gfsa_experiments.results.family_summary import lines_of, of_recipe
from gfsa_experiments.results.load_rows import read_folder, read_folder_if_any
from gfsa_experiments.results.page_blocks import to_markdown
from gfsa_experiments.results.tuning_table import tuning_blocks

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
    judged = FIGURES.judged
    said = to_markdown(of_recipe(judged, recipe))
    assert said.strip() in (RESULTS / f"{recipe}.md").read_text("utf-8")
    for family, found in judged:
        own = recipe in {task for o in found for task, _ in o.comparison.tasks}
        assert (f"families/{family.name}.toml" in said) == own
        if own and all(outcome.is_complete for outcome in found):
            assert all(f"{o.comparison.name}: {o.verdict}" in said for o in found)
    assert of_recipe(judged, "lra") == []


def test_what_is_written_of_wikitext2_is_that_of_the_rows() -> None:
    """Prose of results/causal_lm.md: the family's numbers, and those of the tuning."""
    page = " ".join((RESULTS / "causal_lm.md").read_text("utf-8").split())
    perplexity = {
        own.name: own.line.rows.test.mean() for own in lines_of(FIGURES.of_family("wikitext2"))
    }
    names = {"plain": "plain has", "degree1": "degree 1", "gfsa": "GFSA"}
    said = ", ".join(f"{word} {perplexity[name]:.2f}" for name, word in names.items())
    assert f"On test {said}." in page
    for a, b, words in (
        ("gfsa", "plain", "GFSA − plain {} ({} … {})"),
        ("degree1", "plain", "degree 1 − plain {} ({} … {})"),
        ("gfsa", "degree1", "GFSA − degree 1 {} ({} … {})"),
        ("gain", "gfsa", "ends {} higher than GFSA ({} … {})"),
        ("longer", "gfsa", "ends {} higher than GFSA ({} … {})"),
        ("twicing", "gfsa", "GFSA ends {} lower still ({} … {})"),
    ):
        found = FIGURES.family_difference("wikitext2", a, b)
        numbers = (f"{x:.2f}".replace("-", "−") for x in (found.mean, found.low, found.high))
        assert words.format(*numbers) in page
    gains = {name: perplexity["plain"] - value for name, value in perplexity.items()}
    assert f"gains {gains['longer']:.2f} and ends" in page
    assert f"plain gains {gains['twicing']:.2f}" in page
    # 11 epochs instead of 10
    assert f"worth {10 * gains['gfsa'] / gains['longer']:.0f} % more epochs" in page
    assert f"GFSA has {100 * gains['gfsa'] / perplexity['plain']:.1f} % lower perplexity" in page
    assert f"({math.log(perplexity['plain'] / perplexity['gfsa']):.3f} nats)" in page
    assert f"and {-gains['gain']:.2f} higher than plain (exploratory)" in page


def test_what_is_written_of_wikitext2s_tuning_is_that_of_the_rows() -> None:
    page = " ".join((RESULTS / "causal_lm.md").read_text("utf-8").split())
    found = read_folder_if_any(RESULTS / "tuning").rows
    own = found[found.recipe == "causal_lm"]
    keys = {run.key() for run in runs_of_plan(RESULTS / "plans/causal_lm-tuning.txt")}
    assert is_of(own, keys).all()
    assert f"{len(own)} runs, one seed" in page
    assert len(own) == len(keys)
    best = [
        best_by_arm(own[own.settings.str.contains(f"warmup={warmup}")])
        for warmup in ("0.05", "0.15", "0.3")
    ]
    usual = own[own.settings.str.contains(r" lr=0.001 (?!gain_lr).*warmup=0.05")]
    plain = [f"{found['plain']:.1f}" for found in (best_by_arm(usual), *best)]
    said = "from {} at 1e-3 to {} at 2e-3, and with a longer warm-up to {} (0.15"
    assert said.format(*plain) in page
    assert f"and {plain[3]} (0.3), both at 4e-3" in page
    leads = [f"{found['plain'] - found['GFSA']:.1f}" for found in best]
    said = "{} with a warm-up of 0.05, {} with 0.15, {} with 0.3."
    assert said.format(*leads) in page
    leads = [f"{found['plain'] - found['degree 1']:.1f}" for found in best]
    assert "Degree 1's: {}, {} and {}.".format(*leads) in page
    # at the same rate and warm-up, filters at the rate that is the best of them
    usual = own[~own.settings.str.contains("gain_lr") & ~own.options.str.contains("filter_lr=0.1$")]
    cells = usual.pivot_table(values="valid", index="settings", columns=arms_of(usual))
    gfsa = (cells["plain"] - cells["GFSA"]).dropna()
    said = f"in {sum(gfsa > 0)} of {len(gfsa)} cells of the table"
    assert f"{said} (in the middle by {gfsa.median():.2f})" in page
    degree1 = (cells["plain"] - cells["degree 1"]).dropna()
    assert f"degree 1 in {sum(degree1 > 0)} of {len(degree1)}." in page
    last = own[own.settings.str.contains("warmup=0.3")]
    rates = last.settings.str.extract(r" lr=([\d.]+)", expand=False)
    arms = arms_of(last)
    assert set(rates[last.groupby(arms).valid.idxmin()]) == {"0.004"}
    assert set(rates.groupby(arms).max()) == {"0.008"}


def best_by_arm(own: pd.DataFrame) -> dict[str, float]:
    """The lowest perplexity on valid."""
    return own.groupby(arms_of(own)).valid.min().to_dict()


def arms_of(own: pd.DataFrame) -> pd.Series:
    """Filters that learn their gain alone are an arm."""
    names = {"gfsa": "GFSA", "degree1": "degree 1"}
    return own.method.replace(names).mask(own.options.str.contains("learn=w1"), "gain only")


def _cells(page: str, first: str) -> list[list[str]]:
    lines = page.splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith(first))
    rows = takewhile(lambda line: line.startswith("|"), lines[start + 2 :])
    return [[cell.strip().strip("*") for cell in row.strip("|").split("|")] for row in rows]


def _at_dropout(rows: pd.DataFrame, dropout: str) -> pd.DataFrame:
    """The runs as the family trains, but for dropout; its default is 0.1."""
    words = [set(text.split()) for text in rows.settings]
    own = rows[["lr=0.004" in own and "warmup=0.3" in own for own in words]]
    own = own[~own.settings.str.contains("gain_lr") & ~own.options.str.contains("learn")]
    found = own.settings.str.extract(r"dropout=([\d.]+)", expand=False).fillna("0.1")
    return own[found == dropout]


@pytest.fixture(scope="module")
def runs_on_wikitext2() -> pd.DataFrame:
    """Of a run that was tuned with and then checked, the check."""
    rows = pd.concat([read_folder(RESULTS / name).rows for name in ("tuning", "checks")])
    own = rows[rows.recipe == "causal_lm"]
    return own.drop_duplicates(["task", "method", "options", "settings", "seed"], keep="last")


def test_the_table_of_dropout_is_that_of_the_rows(runs_on_wikitext2: pd.DataFrame) -> None:
    page = (RESULTS / "causal_lm.md").read_text("utf-8")
    best, shares, arms = {}, [], ["plain", "degree1", "gfsa"]
    for dropout, *said in _cells(page, "| dropout |"):
        if dropout == "0.2":
            lines = lines_of(FIGURES.of_family("wikitext2"))
            means = {own.name: own.line.rows.test.mean() for own in lines}
            valid = {own.name: own.line.rows.valid.mean() for own in lines}
        else:
            own = _at_dropout(runs_on_wikitext2, "0.0" if dropout == "0" else dropout)
            assert {tuple(sorted(seeds)) for _, seeds in own.groupby("method").seed} == {(0, 1)}
            means = own.groupby("method").test.mean()
            valid = own.groupby("method").valid.mean()
        wanted = [f"{means[arm]:.2f} ({valid[arm]:.2f})" for arm in arms]
        best[dropout] = valid
        shares.append(f"{100 * (1 - means['gfsa'] / means['plain']):.1f}")
        gaps = [means[a] - means[b] for a, b in (arms[1::-1], arms[2::-2], arms[2:0:-1])]
        assert said == [*wanted, *(f"{gap:.2f}".replace("-", "−") for gap in gaps)]
    # the best for every arm, and the lead there
    assert all(min(best, key=lambda at: best[at][arm]) == "0.1" for arm in arms)
    words = " ".join(page.split())
    assert f"at all four: by {', '.join(shares[:-1])} and {shares[-1]} %" in words
    own = _at_dropout(runs_on_wikitext2, "0.1").set_index(["method", "seed"]).test
    leads = sorted(own["plain"] - own["gfsa"])
    assert f"there the lead is {leads[0]:.2f} and {leads[1]:.2f} on the two seeds" in words
    fast = runs_on_wikitext2[runs_on_wikitext2.settings.str.contains("gain_lr=0.01 .*warmup=0.3")]
    assert f"brings nothing: {fast.valid.item():.2f} on valid" in words


PEERS = {
    "plain": [("plain", "")],
    "FeatScale": [("featscale", ""), ("featscale", "filter_lr=0.01")],
    "NeuTRENO": [("neutreno", "strength=0.6"), ("neutreno", "strength=0.3")],
    "LayerScale": [("layerscale", ""), ("layerscale", "filter_lr=0.01")],
    "AttnScale": [("attnscale", ""), ("attnscale", "filter_lr=0.01")],
    "ContraNorm": [("contranorm", "strength=0.01"), ("contranorm", "strength=0.1")],
    "twicing (the family's ten seeds)": [("twicing", "")],
    "degree 1 (the family's ten seeds)": [("degree1", "filter_lr=0.01")],
    "GFSA": [("gfsa", "filter_lr=0.01")],
}


def test_the_table_of_peers_is_that_of_the_rows(runs_on_wikitext2: pd.DataFrame) -> None:
    page = (RESULTS / "causal_lm.md").read_text("utf-8")
    own = _at_dropout(runs_on_wikitext2, "0.2")
    lines = _cells(page, "| peer |")
    assert [line[0] for line in lines] == list(PEERS)
    family = pd.concat([one.line.rows for one in lines_of(FIGURES.of_family("wikitext2"))])
    for name, added, *said, test in lines:
        rows = family if "family" in name else own
        forms = [rows[(rows.method == m) & (rows.options == o)] for m, o in PEERS[name]]
        assert {len(form) for form in forms} == {10 if "family" in name else 2}
        assert {int(added.replace(",", ""))} == {int(n) for form in forms for n in form.added}
        valid = [form.valid.mean() for form in forms]
        shown = [cell.split()[0].strip("*") for cell in said if cell]
        assert shown == [f"{value:.2f}" for value in valid], name
        lower = min(forms, key=lambda form: float(form.valid.mean()))
        assert test == f"{lower.test.mean():.2f}", name


def test_the_step_on_wikitext2_is_that_of_the_rows() -> None:
    page = " ".join((RESULTS / "causal_lm.md").read_text("utf-8").split())
    rows = read_folder(RESULTS / "times").rows
    own = rows[(rows.recipe == "causal_lm") & rows.settings.str.contains("compile=blocks")]
    ms = {
        f"{m} {o}".strip(): 1e3 * float(t)
        for m, o, t in zip(own.method, own.options, own.seconds_per_step, strict=True)
    }
    plain, gfsa = ms.pop("plain"), ms.pop("gfsa filter_lr=0.01")
    said = f"a step with GFSA takes **{gfsa / plain:.2f}×** ({gfsa:.2f} ms against {plain:.2f};"
    assert said in page
    # timed with earlier kernels, it would be compared with the present plain model
    assert not ms


def test_steps_of_earlier_kernels_are_those_of_their_rows() -> None:
    """What was timed before stays, apart from what it would be compared with."""
    page = " ".join((RESULTS / "causal_lm.md").read_text("utf-8").split())
    early, times = read_folder(RESULTS / "times/earlier").rows, read_folder(RESULTS / "times").every
    times = times[(times.recipe == "causal_lm") & times.settings.str.contains("compile=blocks")]
    (plain,) = early[early.method == "plain"].seconds_per_step
    ratios = list(early[early.method != "plain"].seconds_per_step / plain)
    assert f"in an earlier session plain took {1e3 * plain:.2f})" in page
    now = times.set_index(["method", "commit"]).seconds_per_step
    before = now["gfsa", "6fb7f02"] / now["plain", "6fb7f02"]
    assert f"it took {before:.2f} to {max(ratios):.2f}×, and degree 1, gain only and" in page
    assert {f"{ratio:.2f}" for ratio in ratios} <= {"1.18", "1.19"}
    every = pd.concat([early, times])
    gfsa = every[(every.method == "gfsa") & (every.options == "filter_lr=0.01")]
    assert len(gfsa) == 3
    assert gfsa.test.nunique() == gfsa.valid.nunique() == gfsa.coefficients.nunique() == 1
