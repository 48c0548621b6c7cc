"""The page's first paragraph, the family's table and the controls, from rows that are known."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from gfsa_experiments.results.families import read_family, tomllib
from gfsa_experiments.results.page_blocks import to_markdown
from gfsa_experiments.results.pretraining.answer import (
    QUESTIONS,
    answer,
    answers,
    family_tables,
)
from gfsa_experiments.results.pretraining.controls import controls, rates
from gfsa_experiments.results.verdicts import Outcome, outcomes
from gfsa_experiments.runs.row import Row
from gfsa_experiments.tasks.pretrain.recipe import PretrainConfig

FOLDER = Path(__file__).parents[2] / "results/families"
FAMILY = FOLDER / "pretrain.toml"
LENGTHS = {"pretrain": "10 tokens", "pretrain-epoch": "3.4 tokens", "pretrain-epoch-best": "3.4"}
NOISE = (0.001, -0.002, 0.0, 0.002, -0.001, 0.0005)


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The family's outcomes if lines end so far from plain; ``without`` leaves out a run."""
    monkeypatch.setattr(PretrainConfig, "sketch", lambda config: None)
    family = read_family(FAMILY)

    def make(without: int = 0, noise: float = 1.0, **ends: float) -> list[Outcome]:
        lines = {
            key: name
            for comparison in family.comparisons
            for name in (comparison.a, comparison.b)
            for key in comparison.keys(name)
        }
        order = sorted(set(lines.values()))
        rows = []
        for key, name in list(lines.items())[without:]:
            # every line has the same noise in another order of the seeds
            own = noise * NOISE[(key.seed + order.index(name)) % 6]
            loss = 1.7 + 0.1 * (key.seed - 100) + ends.get(name, 0.0) + own
            row = Row(
                **key._asdict(),
                metric="loss",
                higher_is_better=False,
                test=loss,
                valid=loss,
                commit="abc",
                data="1 a",
            )
            rows.append(row)
        return outcomes(family, pd.DataFrame(rows))

    return make


def test_every_comparison_of_the_families_has_a_question() -> None:
    asked = set()
    for name in LENGTHS:
        content = tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
        asked |= {(own["a"], own["b"]) for own in content["comparison"]}
    assert asked == set(QUESTIONS)


def test_every_family_has_a_paragraph_and_a_table(verdicts: Any) -> None:
    """Each with the length of its runs, in the order of the families."""
    families = {"pretrain-epoch": verdicts(degree1=-0.03), "pretrain": verdicts()}
    first, second = answers(families, LENGTHS).split("\n\n")
    assert first.startswith("*After 3.4 tokens.* **Confirmed: degree 1 ends lower than plain.**")
    assert second.startswith("*After 10 tokens.* **Not confirmed:")
    page = to_markdown(family_tables(families, LENGTHS))
    assert page.count("does GFSA end lower than plain?") == 2
    assert page.index("families/pretrain-epoch.toml") < page.index("families/pretrain.toml")
    assert answers({}, LENGTHS).startswith("**Nothing is confirmed:**")
    assert family_tables({}, LENGTHS) == []


def test_a_gain_is_confirmed(verdicts: Any) -> None:
    found = answer(verdicts(gfsa=-0.02, degree1=-0.02, longer=-0.02))
    assert found.startswith("**Confirmed: GFSA and degree 1 end lower than plain.** GFSA ends 0.02")
    # the same loss as longer plain: what is confirmed is said of nothing else
    confirmed, bounded = found.split("No difference is confirmed for")
    assert "GFSA − longer plain" in bounded
    assert confirmed.count("(Holm's p") == 4
    assert bounded.count(" − ") == 2


def test_one_filter_alone_may_gain(verdicts: Any) -> None:
    found = answer(verdicts(degree1=-0.03, gfsa=0.03))
    assert found.startswith(
        "**Confirmed: degree 1 ends lower than plain, GFSA ends higher than plain.**"
    )


def test_nothing_is_confirmed_of_noise(verdicts: Any) -> None:
    found = answer(verdicts())
    assert found.startswith("**Not confirmed: no filter is shown to end lower than plain.**")
    assert "lower than plain (Holm" not in found
    assert found.split("No difference is confirmed for")[1].count(" − ") == 6


def test_a_control_is_part_of_the_answer(verdicts: Any) -> None:
    """A gain over plain that gated heads have too, and more of it."""
    found = answer(verdicts(gfsa=-0.02, gated=-0.04, gain=-0.02))
    assert "GFSA ends 0.020" in found
    assert re.search(r"GFSA ends 0\.02\d \(.*\) nats higher than gated heads", found)
    assert "GFSA − gain only" in found.split("No difference is confirmed for")[1]


def test_an_interval_that_excludes_zero_confirms_nothing(verdicts: Any) -> None:
    """Suggestive by itself, not after Holm's correction."""
    judged = verdicts(gfsa=-0.025, noise=8.0)
    (first, *_) = judged
    assert first.contrast.test.interval.excludes_zero
    assert first.p_holm > 0.05
    assert first.verdict == "suggestive"
    assert answer(judged).startswith("**Not confirmed")
    assert "for GFSA − plain (suggestive), " in answer(judged)


def test_no_number_before_the_last_run(verdicts: Any) -> None:
    judged = verdicts(without=1, gfsa=-0.5)
    assert "no number is read from it" in answer(judged)
    page = to_markdown(family_tables({"pretrain": judged}, LENGTHS))
    assert "0.5" not in page
    assert "of 6 pairs missing: no verdict" in page


def table(losses: dict[str, list[float]], tokens: dict[str, int] | None = None) -> pd.DataFrame:
    rows = [
        {
            "arm": arm,
            "seed": seed,
            "test": loss,
            "tokens": (tokens or {}).get(arm, 100),
            "settings": "lr=0.002 qk_norm=temperature",
        }
        for arm, own in losses.items()
        for seed, loss in enumerate(own, start=1)
    ]
    return pd.DataFrame(rows)


def test_controls_have_one_pooled_spread() -> None:
    found = controls(table({"plain": [2.0, 2.2], "GFSA": [1.9, 2.1], "gated": [2.0, 2.0]}))
    assert found is not None
    # residuals: arm and seed means are taken out; (3 − 1)(2 − 1) degrees of freedom
    values = np.array([[2.0, 2.2], [1.9, 2.1], [2.0, 2.0]])
    r = values - values.mean(1, keepdims=True) - values.mean(0) + values.mean()
    assert found.freedom == 2
    assert found.spread == pytest.approx(math.sqrt((r**2).sum() / 2))
    assert found.spread is not None
    difference = found.difference("gated", "GFSA")
    assert difference is not None
    assert difference.mean == pytest.approx(0.0)
    # t(0.975, 2) = 4.3027
    assert difference.high == pytest.approx(4.3027 * found.spread, rel=1e-4)
    assert found.difference("GFSA", "GFSA") is None


def test_intervals_of_controls_hold_95_times_in_100() -> None:
    random, held, rounds = np.random.default_rng(0), 0, 100
    for _ in range(rounds):
        seeds = random.normal(size=2)
        losses = {f"arm {i}": list(seeds + 0.01 * random.normal(size=2)) for i in range(12)}
        found = controls(table(losses))
        assert found is not None
        difference = found.difference("arm 3", "arm 7")
        assert difference is not None
        held += not difference.excludes_zero
    # 95 are meant, with a standard deviation of 2.2; half the variance would hold 83 times
    assert held > 88


def test_an_arm_without_all_its_runs_is_left_out() -> None:
    found = controls(table({"plain": [2.0, 2.2], "GFSA": [1.9, 2.1], "gated": [2.0, math.nan]}))
    assert found is not None
    assert list(found.means) == ["plain", "GFSA"]
    assert found.seeds == (1, 2)
    assert controls(table({"plain": [math.nan]})) is None


def test_more_steps_are_an_arm_of_their_own() -> None:
    longer = table({"plain": [1.8, 1.9]}, {"plain": 115})
    runs = pd.concat([table({"plain": [2.0, 2.2], "GFSA": [1.9, 2.1]}), longer])
    found = controls(runs)
    assert found is not None
    assert list(found.means) == ["plain", "GFSA", "plain, 1.15 times the steps"]


def test_plain_models_that_are_set_otherwise_are_arms_of_their_own() -> None:
    """A variant of the baseline that is added to the controls."""
    runs = table({"plain": [2.0, 2.2], "GFSA": [1.9, 2.1]})
    wider, learned = table({"plain": [1.8, 1.9]}), table({"plain": [1.7, 1.8]})
    wider["settings"] += " gain_lr=0.3"
    learned["settings"] = "lr=0.002"
    found = controls(pd.concat([learned, wider, runs]))
    assert found is not None
    assert found.means["plain"] == pytest.approx(2.1)
    assert found.means["plain, qk_norm=temperature gain_lr=0.3"] == pytest.approx(1.85)
    assert found.means["plain, qk_norm=learned"] == pytest.approx(1.75)


def test_a_best_rate_at_the_edge_is_said() -> None:
    runs = pd.DataFrame(
        {
            "arm": ["plain"] * 3 + ["GFSA"] * 3,
            "lr": [1e-3, 2e-3, 3e-3] * 2,
            "valid": [2.0, 1.9, 2.1, 2.0, 1.9, 1.8],
        }
    )
    plain, filtered = rates(runs)
    assert (plain.best, plain.is_at_edge) == (2e-3, False)
    assert (filtered.best, filtered.is_at_edge) == (3e-3, True)
    runs.loc[5, "valid"] = math.nan
    assert rates(runs)[1].best == 2e-3
