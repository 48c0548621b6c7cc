"""Any two lines against each other: values by hand and by scipy, and what may be compared."""

from __future__ import annotations

import dataclasses
import math

import pandas as pd
import pytest
from scipy.stats import ttest_ind, ttest_rel

from gfsa_experiments.results.pages import Grid
from gfsa_experiments.results.report import contrast_blocks
from gfsa_experiments.results.statistics import Interval, contrast, mean_of_groups, pooled_reduction
from gfsa_experiments.results.tables import latest, make_tables
from gfsa_experiments.runs.row import Row
from support.result_rows import row, rows

DEGREE_1 = [50.0, 51.5, 52.0]
GFSA = [51.0, 52.0, 54.5]


def frame(recorded: list[Row]) -> pd.DataFrame:
    return latest(recorded).rows


def test_two_filters_are_compared_as_scipy_does() -> None:
    found = contrast(frame(rows("gfsa", GFSA)), frame(rows("degree1", DEGREE_1)))
    assert found is not None
    assert found.reduction is not None
    theirs = ttest_rel(GFSA, DEGREE_1)
    low, high = theirs.confidence_interval(0.95)
    assert (found.test.low, found.test.high) == pytest.approx((low, high))
    assert found.test.p == pytest.approx(theirs.pvalue)
    # differences 1, 0.5, 2.5 of an error of 100 − 51.1667
    assert found.reduction.mean == pytest.approx(100 * (4 / 3) / (100 - 153.5 / 3))
    assert found.reductions == pytest.approx([100 * d / (100 - 153.5 / 3) for d in (1, 0.5, 2.5)])
    assert found.reduction.excludes_zero == found.test.interval.excludes_zero


def test_a_lower_error_is_a_positive_reduction() -> None:
    mae = {"metric": "mae", "higher_is_better": False}
    found = contrast(
        frame(rows("gfsa", [0.4, 0.3], **mae)), frame(rows("plain", [0.5, 0.5], **mae))
    )
    assert found is not None
    assert found.reductions == pytest.approx([20, 40])
    assert found.reduction is not None
    low, high = found.reduction.low, found.reduction.high
    assert low is not None
    assert high is not None
    assert low < found.reduction.mean < high


def test_a_loss_in_nats_is_reduced_as_its_perplexity() -> None:
    """1 − exp(difference), whatever the loss is; perplexities themselves give nearly the same."""
    nats = {"metric": "loss", "higher_is_better": False}
    ours, plain = [1.95, 1.97, 1.96], [1.98, 1.98, 1.99]
    found = contrast(frame(rows("gfsa", ours, **nats)), frame(rows("plain", plain, **nats)))
    assert found is not None
    assert found.reduction is not None
    assert found.reduced == "perplexity"
    low, mean, high = found.test.low, found.test.mean, found.test.high
    assert low is not None
    assert high is not None
    assert found.reduction.mean == pytest.approx(100 * (1 - math.exp(mean)))
    ends = (found.reduction.low, found.reduction.high)
    assert ends == pytest.approx((100 * (1 - math.exp(high)), 100 * (1 - math.exp(low))))
    assert found.reductions == pytest.approx(
        [100 * (1 - math.exp(d)) for d in (-0.03, -0.01, -0.03)]
    )
    as_such = {"metric": "perplexity", "higher_is_better": False}
    same = contrast(
        frame(rows("gfsa", [*map(math.exp, ours)], **as_such)),
        frame(rows("plain", [*map(math.exp, plain)], **as_such)),
    )
    assert same is not None
    assert same.reduction is not None
    assert same.reduction.mean == pytest.approx(found.reduction.mean, abs=0.02)


def test_what_makes_no_error_cannot_be_reduced() -> None:
    perfect = contrast(frame(rows("gfsa", [99.0, 98.0])), frame(rows("plain", [100.0, 100.0])))
    assert perfect is not None
    assert (perfect.reduction, perfect.reductions) == (None, [])
    assert perfect.test.mean == -1.5
    other = contrast(frame(rows("gfsa", GFSA)), frame(rows("plain", DEGREE_1)))
    assert other is not None
    assert pooled_reduction([perfect, other]) == other.reduction
    assert pooled_reduction([perfect]) is None


def test_a_failed_run_is_no_pair() -> None:
    found = contrast(frame(rows("gfsa", [51.0, math.nan, 53.0])), frame(rows("plain", DEGREE_1)))
    assert found is not None
    assert found.test.seeds == (0, 2)
    assert contrast(frame([row("gfsa", 7)]), frame([row("plain", 0)])) is None


def test_the_mean_over_tasks_is_welchs() -> None:
    first, second = [1.0, 2.0, 4.0, 3.5], [-1.0, 5.0, 0.5]
    found = mean_of_groups([first, second])
    # mean(first) − mean(−second) is twice the mean of both means
    theirs = ttest_ind(first, [-value for value in second], equal_var=False)
    low, high = theirs.confidence_interval(0.95)
    assert found.mean == pytest.approx((2.625 + 1.5) / 2)
    assert (found.low, found.high) == pytest.approx((low / 2, high / 2))
    assert mean_of_groups([first, [1.0]]) == Interval((2.625 + 1) / 2)
    assert mean_of_groups([[1.0, 1.0], [2.0, 2.0]]) == Interval(1.5)
    # the same differences, computed from other numbers
    assert mean_of_groups([[90.2 - 90, 8.2 - 8], [2.0, 2.0]]).low is None


def test_one_task_alone_keeps_its_own_interval() -> None:
    found = contrast(frame(rows("gfsa", GFSA)), frame(rows("plain", DEGREE_1)))
    assert found is not None
    assert pooled_reduction([found]) == found.reduction
    assert pooled_reduction([]) is None


MADE = [
    *rows("plain", DEGREE_1),
    *rows("degree1", DEGREE_1, options="filter_lr=0.01"),
    *rows("gfsa", GFSA, options="filter_lr=0.01"),
    *rows("gfsa", [1.0, 2.0, 3.5], options="K=2 filter_lr=0.01"),
    *rows("plain", [40.0, 41.0, 42.5], settings="epochs=6 lr=1"),
    *rows("plain", [10.0, 11.0, 12.5], settings="lr=1"),
]


def pairs(recorded: list[Row], *texts: str) -> list[dict[str, str]]:
    """The rows of the table that ``--contrast`` prints."""
    _, grid = contrast_blocks(make_tables(latest(recorded)), [], texts)
    assert isinstance(grid, Grid)
    return [dict(row) for row in grid.rows]


def test_lines_with_settings_of_their_own_are_compared_too() -> None:
    """Equal time: a plain model that trains for longer has other settings."""
    # of two lines that have the word, the one with fewer other settings
    longer, fewer, plain = pairs(
        MADE,
        "gfsa filter_lr=0.01 - plain epochs=6",
        "gfsa filter_lr=0.01 - plain lr=1",
        "gfsa filter_lr=0.01 - plain",
    )
    assert longer["difference"].startswith("+11.33 (")
    assert fewer["difference"].startswith("+41.33 (")
    assert [line["b"] for line in (longer, plain)] == ["plain epochs=6", "plain"]


def test_lines_with_settings_of_their_own_are_on_the_same_data() -> None:
    """Each table has rows on one set of data alone, so that neither names it."""
    recorded = [
        *rows("gfsa", GFSA, data="1+1+1 a"),
        *rows("plain", DEGREE_1, settings="epochs=6", data="1+1+1 b"),
    ]
    with pytest.raises(ValueError, match=r"not compared: gfsa on 1\+1\+1 a; plain on 1\+1\+1 b"):
        pairs(recorded, "gfsa - plain epochs=6")
    # rows of earlier versions do not note their data
    recorded = [dataclasses.replace(row, data=row.data.replace("1+1+1 b", "")) for row in recorded]
    assert len(pairs(recorded, "gfsa - plain epochs=6")) == 1


def test_a_name_that_two_lines_have_is_refused() -> None:
    recorded = [*MADE, *rows("plain", [1.0, 2.0, 3.0], settings="lr=1 clip=2")]
    with pytest.raises(ValueError, match=r"no task has both lines.*; there are plain, degree1"):
        pairs(recorded, "gfsa filter_lr=0.5 - plain clip=2")
    recorded += rows("plain", [1.0, 2.0, 3.0], settings="epochs=6 clip=2")
    with pytest.raises(ValueError, match="'plain clip=2' is more than one line; name more"):
        pairs(recorded, "degree1 - plain clip=2")
