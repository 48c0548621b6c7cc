"""What the demo says follows from its numbers."""

import pytest

from gfsa_experiments.tasks.digits.experiment import Run
from gfsa_experiments.tasks.digits.summary import closing, paired, summarise


def runs(variant, accuracies, similarity=0.5, seconds=2.0):
    return [
        Run(variant, seed, accuracy, seconds, 100, 6, [1.0], [0.1, similarity + seed / 100], [])
        for seed, accuracy in enumerate(accuracies)
    ]


def test_interval_of_paired_differences():
    # differences 1, 2, 3: mean 2, standard error 1/√3, t(2) = 4.3027
    result = paired([11.0, 22.0, 33.0], [10.0, 20.0, 30.0])
    assert result.mean == pytest.approx(2)
    assert result.upper - result.mean == pytest.approx(4.3027 / 3**0.5, rel=1e-4)
    assert result.finding == "within noise"


@pytest.mark.parametrize(
    ("accuracies", "word"),
    [
        ([91.0, 92.1, 93.0], "helps"),
        ([89.0, 90.1, 91.0], "hurts"),
        ([89.0, 92.0, 91.5], "no difference outside noise"),
    ],
)
def test_the_closing_words_follow_the_differences(accuracies, word):
    summaries = summarise(runs("plain", [90.0, 91.0, 92.0]) + runs("GFSA", accuracies))
    (sentence,) = closing(summaries)
    assert sentence.startswith("GFSA")
    assert word in sentence


def test_the_closing_words_follow_the_similarity():
    plain = runs("plain", [90.0, 91.0], similarity=0.9)
    (sentence,) = closing(summarise(plain + runs("GFSA", [90.0, 91.0], similarity=0.5)))
    assert "less alike" in sentence


def test_one_seed_allows_no_verdict():
    (sentence,) = closing(summarise(runs("plain", [90.0]) + runs("GFSA", [95.0])))
    assert "one seed says nothing" in sentence


def test_times_are_compared_seed_by_seed():
    plain, slow = runs("plain", [1.0, 1.0]), runs("GFSA", [1.0, 1.0], seconds=3.0)
    assert [each.time_ratio for each in summarise(plain + slow)] == [1.0, 1.5]
