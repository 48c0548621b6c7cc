"""Any two lines against each other: values by hand and by scipy, and what may be compared."""

from __future__ import annotations

import math

import pytest
from scipy.stats import ttest_ind

from gfsa_experiments.results.statistics import Interval, contrast, mean_of_groups, pooled_reduction
from gfsa_experiments.results.tables import frame_of
from support.result_rows import row, rows

DEGREE_1 = [50.0, 51.5, 52.0]
GFSA = [51.0, 52.0, 54.5]


def test_two_filters_are_compared() -> None:
    found = contrast(frame_of(rows("gfsa", GFSA)), frame_of(rows("degree1", DEGREE_1)))
    assert found is not None
    assert found.reduction is not None
    # differences 1, 0.5, 2.5 of an error of 100 − 51.1667
    assert found.reduction.mean == pytest.approx(100 * (4 / 3) / (100 - 153.5 / 3))
    assert found.reductions == pytest.approx([100 * d / (100 - 153.5 / 3) for d in (1, 0.5, 2.5)])
    assert found.reduction.excludes_zero == found.test.excludes_zero


def test_a_lower_error_is_a_positive_reduction() -> None:
    mae = {"metric": "mae", "higher_is_better": False}
    found = contrast(
        frame_of(rows("gfsa", [0.4, 0.3], **mae)), frame_of(rows("plain", [0.5, 0.5], **mae))
    )
    assert found is not None
    assert found.reductions == pytest.approx([20, 40])
    assert found.reduction is not None
    low, high = found.reduction.low, found.reduction.high
    assert low is not None
    assert high is not None
    assert low < found.reduction.mean < high


def test_a_loss_in_nats_is_reduced_as_its_perplexity() -> None:
    """1 − exp(difference), whatever the loss is."""
    nats = {"metric": "loss", "higher_is_better": False}
    ours, plain = [1.95, 1.97, 1.96], [1.98, 1.98, 1.99]
    found = contrast(frame_of(rows("gfsa", ours, **nats)), frame_of(rows("plain", plain, **nats)))
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


def test_what_makes_no_error_cannot_be_reduced() -> None:
    perfect = contrast(
        frame_of(rows("gfsa", [99.0, 98.0])), frame_of(rows("plain", [100.0, 100.0]))
    )
    assert perfect is not None
    assert (perfect.reduction, perfect.reductions) == (None, [])
    assert perfect.test.mean == -1.5
    other = contrast(frame_of(rows("gfsa", GFSA)), frame_of(rows("plain", DEGREE_1)))
    assert other is not None
    assert pooled_reduction([perfect, other]) == other.reduction
    assert pooled_reduction([perfect]) is None


def test_a_failed_run_is_no_pair() -> None:
    found = contrast(
        frame_of(rows("gfsa", [51.0, math.nan, 53.0])), frame_of(rows("plain", DEGREE_1))
    )
    assert found is not None
    assert found.test.seeds == (0, 2)
    assert contrast(frame_of([row("gfsa", 7)]), frame_of([row("plain", 0)])) is None


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
