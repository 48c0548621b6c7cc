"""What the demo says follows from its numbers."""

import dataclasses

import pytest

from gfsa_experiments.demo.comparison import LONGER
from gfsa_experiments.demo.summary import DemoRun, findings, table_of, time_ratio
from support.result_rows import rows


def runs(variant, accuracies, similarity=0.5, seconds=2.0):
    return [
        DemoRun(row, [0.1, similarity * (1 + row.seed / 100)], [])
        for row in rows(variant, accuracies, seconds_per_step=seconds)
    ]


def test_interval_of_paired_differences():
    # differences 1, 2, 3: mean 2, standard error 1/√3, t(2) = 4.3027
    table = table_of(runs("plain", [10.0, 20.0, 30.0]) + runs("GFSA", [11.0, 22.0, 33.0]))
    plain, other = table.lines
    assert plain.difference is None
    result = other.difference
    assert result.mean == pytest.approx(2)
    assert result.high - result.mean == pytest.approx(4.3027 / 3**0.5, rel=1e-4)
    assert result.verdict == "no difference shown"


@pytest.mark.parametrize(
    ("accuracies", "word"),
    [
        ([91.0, 92.1, 93.0], "helps"),
        ([89.0, 90.1, 91.0], "hurts"),
        ([89.0, 92.0, 91.5], "no difference outside noise"),
    ],
)
def test_the_closing_words_follow_the_differences(accuracies, word):
    (sentence,) = findings(runs("plain", [90.0, 91.0, 92.0]) + runs("GFSA", accuracies))
    assert sentence.startswith("GFSA")
    assert word in sentence


def test_the_closing_words_follow_the_similarity():
    plain = runs("plain", [90.0, 91.0], similarity=0.9)
    (sentence,) = findings(plain + runs("GFSA", [90.0, 91.0], similarity=0.5))
    assert "less alike" in sentence


def test_one_seed_allows_no_verdict():
    (sentence,) = findings(runs("plain", [90.0]) + runs("GFSA", [95.0]))
    assert "one seed says nothing about noise" in sentence


def test_times_are_compared_with_those_of_plain():
    plain, slow = runs("plain", [1.0, 1.0]), runs("GFSA", [1.0, 1.0], seconds=3.0)
    assert time_ratio(plain + slow, "plain") == 1.0
    assert time_ratio(plain + slow, "GFSA") == 1.5


def test_a_loss_that_falls_helps():
    lower = [
        dataclasses.replace(run, row=dataclasses.replace(
            run.row, metric="bits_per_byte", higher_is_better=False))
        for run in runs("plain", [3.0, 3.1, 3.2]) + runs("GFSA", [2.9, 3.01, 3.1])
    ]  # fmt: skip
    (sentence,) = findings(lower)
    assert sentence.startswith("GFSA helps: -0.097 bits per byte")


@pytest.mark.parametrize(
    ("longer", "words"),
    [
        ([89.0, 90.1, 91.0], "it saves time, too"),
        ([96.0, 97.1, 98.0], "saves steps at best, no time"),
        ([94.0, 90.0, 95.5], "not shown"),
    ],
)
def test_equal_time_is_a_comparison_of_its_own(longer, words):
    every = runs("plain", [90.0, 91.0, 92.0]) + runs(LONGER, longer)
    *_, last = findings(every + runs("GFSA K=3", [93.0, 94.0, 95.1], seconds=2.4))
    assert last.startswith("A step of GFSA K=3 took 1.20 times that of plain here.")
    assert last.endswith(f"{words}.")
