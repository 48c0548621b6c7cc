"""Any two lines against each other: values by hand and by scipy, and what may be compared."""

from __future__ import annotations

import math

import pytest

from gfsa_experiments.results.statistics import contrast
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


def test_what_makes_no_error_cannot_be_reduced() -> None:
    perfect = contrast(
        frame_of(rows("gfsa", [99.0, 98.0])), frame_of(rows("plain", [100.0, 100.0]))
    )
    assert perfect is not None
    assert perfect.reduction is None
    assert perfect.test.mean == -1.5


def test_a_failed_run_is_no_pair() -> None:
    found = contrast(
        frame_of(rows("gfsa", [51.0, math.nan, 53.0])), frame_of(rows("plain", DEGREE_1))
    )
    assert found is not None
    assert found.test.seeds == (0, 2)
    assert contrast(frame_of([row("gfsa", 7)]), frame_of([row("plain", 0)])) is None
