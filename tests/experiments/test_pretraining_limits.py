"""What the page says of the family's plain model and controls, by the rules of the plans."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from gfsa_experiments.commands.train import runs_of_plan
from gfsa_experiments.results.families import read_family
from gfsa_experiments.results.page_blocks import to_markdown
from gfsa_experiments.results.pretraining.limits import (
    limit_blocks,
    limit_of_plain,
    limit_of_schedule,
)
from gfsa_experiments.results.pretraining.page import control_table, rate_blocks
from gfsa_experiments.results.pretraining.study import (
    BASELINE,
    LONG,
    LONG_WARMUP,
    RATES,
    Study,
    but_for_warmup,
)
from gfsa_experiments.results.verdicts import Outcome
from gfsa_experiments.tasks.pretrain.recipe import PretrainConfig

RESULTS = Path(__file__).parents[2] / "results"
FAMILY, PLANS = RESULTS / "families/pretrain.toml", RESULTS / "plans"
# the family's plain model, as rows of one epoch have it
OWN = "batch_size=32 lr=0.002 gain_lr=0.1 qk_norm=temperature"
WIDER = f"{OWN} init_std=0.04"
LEARNED = "batch_size=32 lr=0.002 gain_lr=0.1"
NONE = pd.DataFrame()


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> list[Outcome]:
    """The family without any run."""
    monkeypatch.setattr(PretrainConfig, "sketch", lambda config: None)
    comparisons = read_family(FAMILY).comparisons
    return [Outcome(comparison, len(comparison.seeds)) for comparison in comparisons]


def plain_runs(losses: Mapping[str, float], seed: int = 0) -> pd.DataFrame:
    rows = [
        {"method": "plain", "arm": "plain", "settings": text, "seed": seed, "tokens": 100}
        | {"valid": loss, "test": loss}
        for text, loss in losses.items()
    ]
    return pd.DataFrame(rows)


def study(family: list[Outcome], **parts: Any) -> Study:
    return Study(NONE, NONE, NONE, NONE, NONE, [], {"pretrain": family}, **parts)


def test_before_the_last_run_of_the_plan_nothing_is_known(family: list[Outcome]) -> None:
    runs = plain_runs({OWN: 2.0, WIDER: 1.0})
    said = limit_of_plain(study(family, baseline=runs, unfinished=frozenset({BASELINE})))
    assert said.startswith("Whether another plain model is stronger")
    assert "is not known yet" in said
    assert limit_of_plain(study(family)) == ""


def test_no_other_plain_model_is_stronger(family: list[Outcome]) -> None:
    runs = plain_runs({OWN: 2.0, WIDER: 1.981, LEARNED: math.nan})
    said = limit_of_plain(study(family, baseline=runs))
    assert said.startswith("Of 2 other plain models none ends 0.02 nats or more below")


@pytest.mark.parametrize(
    ("fresh", "words"),
    [
        ({}, "init_std=0.04` is stronger, are not run yet"),
        ({OWN: 2.1, WIDER: 2.0}, "**the family's plain model is not the strongest**"),
        # all runs of a plan may have another warm-up
        (
            {f"{OWN} warmup=0.15": 2.1, f"{WIDER} warmup=0.15": 2.0},
            "plain ends lower with `qk_norm=temperature init_std=0.04` by 0.1000 (test loss)",
        ),
        ({OWN: 2.1, WIDER: 2.2}, "init_std=0.04` it is not lower with fresh seeds"),
    ],
)
def test_fresh_seeds_decide(family: list[Outcome], fresh: dict[str, float], words: str) -> None:
    runs = plain_runs({OWN: 2.0, WIDER: 1.97, LEARNED: 2.3})
    controls = plain_runs(fresh or {OWN: 2.1}, seed=1)
    said = limit_of_plain(study(family, baseline=runs, controls=controls))
    assert said.startswith("Of 2 other plain models 1 ends 0.02 nats or more below the family's")
    assert words in said


def rates_of(losses: Mapping[str, tuple[float, float]]) -> pd.DataFrame:
    rows = [
        {"arm": arm, "lr": lr, "valid": loss, "tokens": 100, "settings": ""}
        for arm, own in losses.items()
        for lr, loss in zip((0.002, 0.003), own, strict=True)
    ]
    return pd.DataFrame(rows)


def test_a_control_below_its_best_is_said(family: list[Outcome]) -> None:
    losses = {"plain": (2.0, 1.5), "gain only": (2.0, 1.985), "gated": (2.0, 1.97)}
    said = to_markdown(limit_blocks(study(family, rates=rates_of(losses))))
    assert "on valid after one epoch: gated (lower at 0.003 by 0.030) ([plan]" in said
    assert "gain only" not in said
    so_far = study(family, rates=rates_of(losses), unfinished=frozenset({RATES}))
    said = to_markdown(limit_blocks(so_far))
    assert "gated (lower at 0.003 by 0.030); rates further out are not run yet" in said
    losses["gated"] = (2.0, 1.985)
    said = to_markdown(limit_blocks(study(family, rates=rates_of(losses))))
    assert "Gain only and gated heads end nowhere 0.02 nats or more lower" in said
    losses["gated"] = (math.nan, 1.985)
    assert "gated (lower at 0.003)" in to_markdown(
        limit_blocks(study(family, rates=rates_of(losses)))
    )
    losses["gated"] = (2.0, 1.985)
    known = rates_of(losses)
    # before the run at the family's own rate nothing can be said
    for runs in (known, known[known.lr == 0.003], NONE):
        unknown = study(family, rates=runs, unfinished=frozenset({RATES}))
        assert "is not known yet" in to_markdown(limit_blocks(unknown))
    assert limit_blocks(study(family)) == []


def test_a_longer_warm_up_is_said_and_changes_no_verdict(family: list[Outcome]) -> None:
    losses = {"plain": (2.0, 1.5), "gain only": (2.0, 1.985), "gated": (2.0, 1.97)}
    warmed = [{"arm": "gated", "lr": 0.002, "tokens": 100, "valid": 1.95, "settings": "warmup=0.2"}]
    shorter = {"arm": "gated", "lr": 0.002, "tokens": 50, "valid": 1.5, "settings": "warmup=0.4"}
    known = study(family, rates=rates_of(losses), warmups=pd.DataFrame([*warmed, shorter]))
    said = to_markdown(limit_blocks(known))
    assert "gated (lower at 0.003 by 0.030)" in said
    assert "With a longer warm-up gated ends at 1.950 (lr 0.002); other rates were not run" in said
    warmed.append(warmed[0] | {"lr": 0.004, "valid": 1.94})
    known = study(family, rates=rates_of(losses), warmups=pd.DataFrame([*warmed, shorter]))
    said = to_markdown(limit_blocks(known))
    assert "With a longer warm-up gated ends at 1.950 (lr 0.002), 1.940 (lr 0.004)." in said
    assert "longer" not in to_markdown(limit_blocks(study(family, rates=rates_of(losses))))


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (1.69, "the family's plain model stands"),
        (1.68, "the family's plain model is **not at its best schedule**"),
        (math.nan, "plain breaks down with 720 steps of warm-up"),
    ],
)
def test_a_longer_warm_up_at_the_familys_length(
    family: list[Outcome], loss: float, words: str
) -> None:
    runs = plain_runs({OWN: 1.7, f"{OWN} warmup=0.15": loss}).assign(steps=4800)
    said = limit_of_schedule(study(family, long_warmups=runs))
    assert words in said
    assert "which asks for 0.017 nats" in said
    # filters are not read from these runs, and before its run nothing is said of plain
    filtered = runs.assign(arm="degree 1", valid=1.0)
    both = pd.concat([runs, filtered])
    assert limit_of_schedule(study(family, long_warmups=both)) == said
    assert limit_of_schedule(study(family, long_warmups=filtered)) == ""
    assert limit_of_schedule(study(family)) == ""


def test_the_run_beside_a_longer_warm_up_differs_in_it_alone() -> None:
    """Until the plan is run it is among what is missing; then its partner is found."""
    (partner,) = [run.key() for run in runs_of_plan(PLANS / LONG_WARMUP) if run.method == "plain"]
    keys = [run.key() for run in runs_of_plan(PLANS / LONG)]
    rows, own = (pd.DataFrame([key._asdict() for key in some]) for some in (keys, [partner]))
    found = but_for_warmup(rows, own)
    assert len(found) == 1
    assert found.settings.iloc[0] == partner.settings.replace(" warmup=0.15", "")


def test_pairs_of_plain_models_have_one_warm_up(family: list[Outcome]) -> None:
    runs = plain_runs({OWN: 2.0, WIDER: 1.97})
    short, long = {OWN: 2.5, WIDER: 2.4}, {f"{OWN} warmup=0.2": 2.1, f"{WIDER} warmup=0.2": 2.0}
    controls = plain_runs(short | long, seed=1)
    said = limit_of_plain(study(family, baseline=runs, controls=controls))
    assert "by 0.1000 (test loss)" in said
    broken = plain_runs({OWN: 2.1, WIDER: math.nan}, seed=1)
    said = limit_of_plain(study(family, baseline=runs, controls=broken))
    assert "it is not lower with fresh seeds" in said


def test_the_first_runs_of_the_baseline_are_not_called_what_they_are_not() -> None:
    """Where all runs share a setting, the default of it is not theirs."""
    page = to_markdown(rate_blocks(study([], baseline=plain_runs({OWN: 2.0, WIDER: 1.9}))))
    assert "qk_norm=learned" not in page
    assert "plain: `init_std=0.04` 1.900, 2.000." in page
    page = to_markdown(rate_blocks(study([], baseline=plain_runs({OWN: 2.0, LEARNED: 1.9}))))
    assert "`qk_norm=learned` 1.900, `qk_norm=temperature` 2.000." in page


def test_a_control_that_broke_down_is_named() -> None:
    runs = pd.concat([plain_runs({OWN: 2.0}, 1), plain_runs({OWN: math.nan}, 1)])
    filtered = runs.assign(method="gfsa", arm=["GFSA", "value residual"])
    runs = pd.concat([runs[:1], filtered])
    runs.iloc[1, runs.columns.get_loc("test")] = 1.9
    page = to_markdown(control_table(study([], controls=runs)))
    assert "| GFSA | 1.900 |" in page
    assert "Broke down, which leaves their arm out: value residual (seed 1)." in page
