"""What is said of sizes above the one that was tuned, by the rules of their plans."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
import pytest

from gfsa_experiments.results.page_blocks import to_markdown
from gfsa_experiments.results.pretraining.larger import (
    beside,
    larger_in_short,
    rate_blocks_of_larger,
    size_sentences,
)
from gfsa_experiments.results.pretraining.study import Study, read_study
from gfsa_experiments.tasks.pretrain.recipe import PretrainConfig
from support.pretraining_runs import runs

RESULTS = Path(__file__).parents[2] / "results"
NONE = pd.DataFrame()


def rates_of(**losses: tuple[float, float]) -> pd.DataFrame:
    """Runs at 1e-3 and 2e-3; test is 0.03 above valid."""
    rows = [
        {"arm": arm.replace("_", " "), "lr": lr, "valid": loss, "test": loss + 0.03}
        | {"size": "46M", "ratio": 1.12}
        for arm, own in losses.items()
        for lr, loss in zip((1e-3, 2e-3), own, strict=True)
    ]
    return pd.DataFrame(rows)


def test_each_arm_takes_its_best_rate() -> None:
    page = to_markdown(rate_blocks_of_larger(rates_of(plain=(1.9, 1.8), degree_1=(1.7, 1.75))))
    assert page.startswith("## Learning rate at 46M")
    assert "plain: 1.900 at 0.001, 1.800 at 0.002 (lowest at 0.002; nothing above it was" in page
    assert "degree 1: 1.700 at 0.001, 1.750 at 0.002 (lowest at 0.001; nothing below it was" in page
    # at rates that differ: each arm's best one
    assert "degree 1 − plain, each at its best rate: −0.100 on test (1.730, 1.830)" in page
    assert "One pair: no interval; exploratory" in page
    assert "0.002, is not the best one of degree 1." in page
    page = to_markdown(rate_blocks_of_larger(rates_of(plain=(1.9, 1.8), degree_1=(1.8, 1.75))))
    assert "0.002, is the best one of every arm." in page
    assert rate_blocks_of_larger(NONE) == []


def test_a_run_that_broke_down_is_no_best_rate() -> None:
    page = to_markdown(rate_blocks_of_larger(rates_of(plain=(1.9, math.nan))))
    assert "plain: 1.900 at 0.001, broke down at 0.002 (lowest at 0.001" in page


def both(gap: float) -> pd.DataFrame:
    """15M follows a law; one pair of 46M lies ``gap`` from plain at 1.1 tokens a parameter."""
    small = runs({"15M": (1, 2, 3.4, 10)}, lambda x: -0.1 / x)
    return pd.concat([small, runs({"46M": (1.1,)}, lambda x: gap, (0,))])


@pytest.mark.parametrize(
    ("gap", "verdict"),
    [
        (-0.06, "less than 0.04 nats"),
        (-0.03, "0.04 nats ([plan](plans/pretrain-scaling-46m.txt)) or more: by the rule the"),
        # −0.0931 on the line, −0.0909 by the fit
        (-0.052, "on both sides of 0.04 nats"),
    ],
)
def test_sizes_differ_by_the_rule_alone(gap: float, verdict: str) -> None:
    (sentence,) = size_sentences(both(gap))
    assert "46M beside 15M, 1.1 tokens per parameter, GFSA − plain" in sentence
    assert "(1 pair); 15M has −0.100 at 1.0 (2 pairs), −0.093 at 1.1 on a line" in sentence
    assert "−0.091 there by the fit to 15M alone" in sentence
    assert verdict in sentence


def test_the_nearest_length_is_said_where_it_would_decide_otherwise() -> None:
    (sentence,) = size_sentences(both(-0.058))
    assert "less than 0.04 nats" in sentence
    assert "; +0.042 off the nearest length itself" in sentence
    (sentence,) = size_sentences(both(-0.09))
    assert "nearest length itself" not in sentence


def test_lengths_that_the_smaller_size_lacks_are_not_compared() -> None:
    table = pd.concat([both(-0.06), runs({"46M": (6.0,)}, lambda x: -0.1, (0,))])
    assert [round(one.cell.ratio, 1) for one in beside(table, "GFSA")] == [1.1]
    assert size_sentences(NONE) == []


def test_the_first_page_says_what_larger_sizes_show() -> None:
    table = both(-0.06)
    study = Study(table, NONE, NONE, NONE, NONE, [])
    said = larger_in_short(study, table)
    assert "GFSA −0.060 (46M, 1.1; 15M −0.093; 1 pair)" in said
    assert "(0.04 nats) 46M is not shown to differ from 15M." in said
    assert "By tokens" not in said
    assert "Not run yet" not in said
    missing = frozenset(f"pretrain-scaling-{size}.txt" for size in ("110m", "46m", "15m"))
    said = larger_in_short(Study(table, NONE, NONE, NONE, NONE, [], unfinished=missing), table)
    assert said.endswith("Not run yet: other runs of 46M and 110M.")
    last = frozenset(["pretrain-scaling-110m.txt"])
    said = larger_in_short(Study(table, NONE, NONE, NONE, NONE, [], unfinished=last), table)
    assert said.endswith("Not run yet: 110M.")
    small = table[table["size"] == "15M"]
    assert "not known" in larger_in_short(Study(small, NONE, NONE, NONE, NONE, []), small)


def test_the_first_page_says_that_sizes_differ() -> None:
    table = both(-0.03)
    said = larger_in_short(Study(table, NONE, NONE, NONE, NONE, []), table)
    assert "46M differs from 15M: the gap does not follow from tokens per parameter alone" in said
    open_ = both(-0.052)
    said = larger_in_short(Study(open_, NONE, NONE, NONE, NONE, []), open_)
    assert "46M is not decided." in said


def test_sizes_are_set_beside_each_other_by_tokens() -> None:
    # 3 tokens a parameter of 46M are as many as 9.2 of 15M
    small = runs({"15M": (1, 3, 46 / 5)}, lambda x: -0.1 / x)
    table = pd.concat([small, runs({"46M": (1, 3)}, lambda x: -0.1 / x, (0,))])
    said = larger_in_short(Study(table, NONE, NONE, NONE, NONE, []), table)
    assert "By tokens: GFSA after 138M −0.011 at 15M, −0.033 at 46M." in said


def test_the_plan_of_the_rates_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PretrainConfig, "sketch", lambda config: None)
    study = read_study(RESULTS)
    assert len(study.larger_rates) == 4
    page = to_markdown(rate_blocks_of_larger(study.larger_rates))
    assert page.strip() in (RESULTS / "pretraining-details.md").read_text("utf-8")
