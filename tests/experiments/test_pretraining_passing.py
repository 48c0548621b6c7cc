"""What the long runs pass on the way, what an arm is worth in steps of plain, and warm-ups."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from gfsa_experiments.results.page_blocks import to_markdown
from gfsa_experiments.results.pretraining.collect import RUN
from gfsa_experiments.results.pretraining.figure import draw
from gfsa_experiments.results.pretraining.page import detail_blocks, first_blocks
from gfsa_experiments.results.pretraining.passing import (
    gaps_on_the_way,
    passing_blocks,
    passings,
    with_tuned_plain,
)
from gfsa_experiments.results.pretraining.study import Study
from gfsa_experiments.results.pretraining.warmups import warmup_blocks
from gfsa_experiments.results.pretraining.worth import worth, worth_sentences
from support.pretraining_runs import runs

NONE = pd.DataFrame()


def curves_of(table: pd.DataFrame, slope: float = 0.2) -> pd.DataFrame:
    """Curves that end where their runs do and fall by ``slope`` for each factor e of tokens."""
    lines = []
    for run in table.to_dict("records"):
        for share in np.arange(1, 11) / 10:
            line = {name: run[name] for name in (*RUN, "arm", "size")}
            line |= {"tokens": run["tokens"] * share, "step": int(1000 * share)}
            lines.append(line | {"valid loss": run["valid"] - slope * math.log(share)})
    return pd.DataFrame(lines)


def test_the_gap_on_the_way_is_that_of_the_longest_runs() -> None:
    """Short runs have a gap of 0.5, long ones of 0.1, all along their curves."""
    table = runs({"15M": (1.5, 10)}, lambda x: -0.1 if x == 10 else -0.5, (0, 1, 2))
    (found,) = passings(curves_of(table), table)
    assert (found.size, found.ratio) == ("15M", 1.5)
    assert found.gaps_of_ends["GFSA"].mean == pytest.approx(-0.5)
    assert found.gaps_on_the_way["GFSA"].mean == pytest.approx(-0.1)
    assert found.gaps_on_the_way["GFSA"].seeds == (0, 1, 2)
    # plain's curve is a line over log tokens, on which its short runs lie
    assert found.ending == pytest.approx(4 - math.log(1.5) / 5 + 0.1)
    assert found.on_the_way == pytest.approx(found.ending)
    way = gaps_on_the_way(curves_of(table), table, "15M")
    assert list(way) == pytest.approx(range(1, 11))
    assert [gaps["GFSA"].mean for gaps in way.values()] == pytest.approx([-0.1] * 10)


def test_before_the_first_validation_nothing_is_passed() -> None:
    table = runs({"15M": (0.9, 10)}, lambda x: -0.1)
    assert passings(curves_of(table), table) == []
    assert passings(NONE, table) == []
    assert passing_blocks([], ("GFSA",)) == []


@pytest.mark.parametrize(("slope", "is_untuned"), [(0.1, True), (0.3, False)])
def test_a_short_plain_run_above_a_long_one_is_not_tuned(slope: float, is_untuned: bool) -> None:
    table = runs({"15M": (2, 4, 10)}, lambda x: -0.4 / x, (0, 1))
    curves = curves_of(table, slope)
    found = passings(curves, table)
    assert [one.shows_untuned_plain for one in found] == [is_untuned, is_untuned]
    # what is fitted, and what is saved by the ends of runs, is told by the others alone
    lengths = set(with_tuned_plain(table, found).ratio)
    assert lengths == ({10} if is_untuned else {2, 4, 10})
    study = Study(table, curves, NONE, NONE, NONE, [])
    page = to_markdown([*first_blocks(study), *detail_blocks(study, {})])
    assert "## What the long runs pass on the way" in page
    said = "**Short runs are not against a tuned plain model** (15M: 2.0 and 4.0 tokens"
    assert (said in page) == is_untuned
    assert ("| 15M | 30M | 2.0‡ |" in page) == is_untuned
    assert ("GFSA − plain: no fit" in page) == is_untuned
    assert ("GFSA − plain at 15M, fitted by −0.400" in page) != is_untuned
    panel = draw(study, {}, None).axes[2]
    hollow = [line for line in panel.lines if line.get_markerfacecolor() == "white"]
    assert [len(np.asarray(line.get_xdata())) for line in hollow] == ([2] if is_untuned else [])
    assert ("hollow" in panel.get_title()) == is_untuned


def test_the_figure_has_the_gap_on_the_way() -> None:
    table = runs({"15M": (2, 10)}, lambda x: -0.1 if x == 10 else -0.5, (0, 1, 2), noise=1e-3)
    study = Study(table, curves_of(table), NONE, NONE, NONE, [])
    panel = draw(study, {}, None).axes[2]
    way = max(panel.lines, key=lambda line: len(np.asarray(line.get_xdata())))
    assert np.asarray(way.get_xdata()) == pytest.approx(np.arange(1, 11))
    assert np.asarray(way.get_ydata()) == pytest.approx(np.full(10, -0.1), abs=5e-3)


def worth_table(noise: float) -> pd.DataFrame:
    """GFSA ends where plain ends with 1.2 times the tokens; plain trained for 1.1 times, too."""
    table = runs({"15M": (10, 11)}, lambda x: -math.log(1.2) / 5, range(6), noise)
    return table[~((table.arm == "GFSA") & (table.ratio == 11))]


def test_an_arm_is_worth_the_steps_that_were_put_in() -> None:
    found = worth(worth_table(0.0), "GFSA", "15M")
    assert found is not None
    assert found.longer == pytest.approx(1.1)
    assert found.steps is not None
    assert found.steps.mean == pytest.approx(1.2)
    assert found.gap_at_equal_time(1.06).mean == pytest.approx(-math.log(1.2 / 1.06) / 5)
    assert found.gap_at_equal_time(1.2).mean == pytest.approx(0)
    (said,) = worth_sentences([found])
    assert "GFSA 20 % (20 … 20)." in said
    assert "At equal time GFSA − plain would be −0.025" in said
    # no length of plain beyond GFSA's, or one seed
    assert worth(runs({"15M": (10,)}, lambda x: -0.1), "GFSA", "15M") is None
    one = worth_table(0.0)
    assert worth(one[one.seed == 0], "GFSA", "15M") is None
    assert worth(one, "degree 1", "15M") is None


def test_the_worth_of_an_arm_has_an_interval_that_holds() -> None:
    """Fieller's: noise of plain is in both of the means whose ratio is taken."""
    random, held, rounds = np.random.default_rng(0), 0, 100
    for _ in range(rounds):
        table = worth_table(0.0)
        table["test"] += 0.003 * random.normal(size=len(table))
        found = worth(table, "GFSA", "15M")
        assert found is not None
        steps = found.steps
        if steps is None or steps.low is None or steps.high is None:
            # longer training is not shown to help: any number of steps
            held += 1
        else:
            held += steps.low <= 1.2 <= steps.high
    # 95 are meant, with a standard deviation of 2.2
    assert held > 88


def test_at_the_ends_of_the_worth_the_gap_at_equal_time_has_an_end_at_zero() -> None:
    """What Fieller's interval is: the factors of steps for which no gap is shown."""
    table = worth_table(0.0)
    table["test"] += 0.002 * np.random.default_rng(1).normal(size=len(table))
    found = worth(table, "GFSA", "15M")
    assert found is not None
    steps = found.steps
    assert steps is not None
    assert steps.low is not None
    assert steps.high is not None
    assert found.gap_at_equal_time(steps.low).high == pytest.approx(0, abs=1e-9)
    assert found.gap_at_equal_time(steps.high).low == pytest.approx(0, abs=1e-9)


def test_the_worth_is_not_known_where_plain_gains_nothing() -> None:
    table = worth_table(0.0)
    table.loc[table.ratio == 11, "test"] += 0.05
    found = worth(table, "GFSA", "15M")
    assert found is not None
    assert found.steps is None
    assert "GFSA not known" in worth_sentences([found])[0]


def test_warmups_are_shown_once_one_was_tried() -> None:
    losses = {
        ("plain", ""): 3.3,
        ("plain", "warmup=0.5"): 2.7,
        ("GFSA", ""): 2.9,
        ("GFSA", "warmup=0.5"): 2.65,
    }
    table = pd.DataFrame(
        [
            {"arm": arm, "settings": text, "steps": 482, "ratio": 1.0, "lr": 2e-3, "valid": loss}
            for (arm, text), loss in losses.items()
        ]
    ).assign(tokens=100)
    # gates are parameters, too: fewer tokens for each of them
    gated = {"arm": "gated", "settings": "warmup=0.5", "steps": 482, "ratio": 0.99, "lr": 2e-3}
    table = pd.concat([table, pd.DataFrame([{**gated, "valid": 2.68, "tokens": 100}])])
    page = to_markdown(warmup_blocks(table))
    assert "| 1.0 | 0.002 | 24 | 3.300 | 2.900 | – |" in page
    assert "| 1.0 | 0.002 | 241 | 2.700 | 2.650 | 2.680 |" in page
    assert "| 1.0 | best | − plain's best | – | −0.050 | −0.020 |" in page
    assert warmup_blocks(table[table.settings == ""]) == []
    assert warmup_blocks(NONE) == []
