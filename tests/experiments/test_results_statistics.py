"""Intervals and p values against scipy and numbers worked out by hand."""

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.stats import ttest_rel

from gfsa_experiments.results.statistics import holm, paired_difference


def seeded(values):
    return dict(enumerate(values))


def test_interval_worked_by_hand():
    # differences 1, 2, 3: mean 2, std 1, t(0.975, 2) = 4.302653
    found = paired_difference(seeded([10, 20, 30]), seeded([11, 22, 33]), higher_is_better=True)
    assert found.values == (1, 2, 3)
    assert found.mean == 2
    assert found.low == pytest.approx(2 - 4.302653 / math.sqrt(3), abs=1e-6)
    assert found.high == pytest.approx(2 + 4.302653 / math.sqrt(3), abs=1e-6)
    # t = 2·√3 with 2 degrees of freedom: p = 1 − t/√(2 + t²)
    assert found.p == pytest.approx(1 - math.sqrt(12 / 14), abs=1e-9)
    assert found.verdict == "no difference shown"


values = st.lists(st.tuples(st.floats(-100, 100), st.floats(-100, 100)), min_size=2, max_size=8)


@settings(max_examples=50, deadline=None)
@given(values)
def test_agrees_with_scipy(pairs):
    plain, method = zip(*pairs, strict=True)
    differences = [b - a for a, b in pairs]
    assume(max(differences) - min(differences) > 1e-6)
    found = paired_difference(seeded(plain), seeded(method), higher_is_better=True)
    theirs = ttest_rel(method, plain)
    low, high = theirs.confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-9, abs=1e-9)
    assert found.p == pytest.approx(theirs.pvalue, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(
    ("change", "higher", "verdict", "better"),
    [
        (+1, True, "better", 4),
        (-1, True, "worse", 0),
        (+1, False, "worse", 0),
        (-1, False, "better", 4),
    ],
)
def test_direction_of_the_metric(change, higher, verdict, better):
    plain = seeded([10.0, 11.0, 12.0, 13.0])
    method = {seed: value + change + 0.01 * seed for seed, value in plain.items()}
    found = paired_difference(plain, method, higher)
    assert found.verdict == verdict
    assert found.seeds_better == better
    assert found.mean == pytest.approx(change + 0.015)


def test_only_seeds_that_both_have_are_paired():
    plain = {0: 1.0, 1: 2.0, 7: 100.0}
    method = {1: 2.5, 0: 1.25, 9: -100.0}
    found = paired_difference(plain, method, higher_is_better=True)
    assert found.seeds == (0, 1)
    assert found.values == (0.25, 0.5)
    assert paired_difference({0: 1.0}, {1: 1.0}, higher_is_better=True) is None


def test_ties_are_not_better():
    found = paired_difference(seeded([1, 1, 1]), seeded([1, 2, 0]), higher_is_better=True)
    assert found.seeds_better == 1


def test_one_seed_has_no_interval():
    found = paired_difference({3: 1.0}, {3: 2.0}, higher_is_better=True)
    assert (found.low, found.high, found.p, found.verdict) == (None, None, None, None)
    assert found.mean == 1.0


def test_equal_differences_give_no_interval_of_width_zero():
    # 0.1 + 0.2 − 0.2 and the like differ in the last digit only
    plain = seeded([0.1, 0.3, 0.7])
    method = {seed: value + 0.2 for seed, value in plain.items()}
    assert len({method[s] - plain[s] for s in plain}) > 1
    assert paired_difference(plain, method, higher_is_better=True).verdict is None


def test_holm_worked_by_hand():
    # sorted: 0.005·4, 0.01·3, 0.03·2, then 0.04·1 held up to the one before
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []
