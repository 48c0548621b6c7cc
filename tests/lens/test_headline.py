"""The first sentences of a report, and one colour per method."""

from __future__ import annotations

import math

import pytest

from gfsa.lens import LensReport
from gfsa.lens.colours import COLOURS, series_of
from gfsa.lens.findings import headline
from gfsa.lens.page import render
from gfsa.lens.readings import AttentionReading, FeatureReading, ModelReading
from gfsa.lens.trajectory import LayerTrajectory, Trajectory


def reading(
    name: str, cosine: float, coefficients: list[float] | None = None, learned: int = 3
) -> ModelReading:
    """A model of one layer whose tokens end with ``cosine``; plain without ``coefficients``."""
    nothing = [math.nan]
    layer = AttentionReading(
        1,
        "a",
        None if coefficients is None else "GFSA",
        [coefficients or [0.0, 1.0]],
        ["low-pass"],
        nothing,
        nothing,
        nothing,
        nothing,
    )
    features = [
        FeatureReading(depth, "", value, 5.0, 10.0, 0.5, 1.0, [1.0])
        for depth, value in enumerate((0.1, cosine))
    ]
    parameters = 0 if coefficients is None else learned
    return ModelReading(name, "M", 9, parameters, 1, 1, 0, {"total": 1.0}, features, [layer])


def advice(*models: ModelReading) -> str:
    return " ".join(headline(models).advises)


def test_models_are_compared_with_the_plain_one_wherever_it_stands() -> None:
    found = headline([reading("GFSA", 0.3, [-0.2, 1.0, 0.1]), reading("plain", 0.6)]).compares[0]
    assert "tokens of plain have a mean cosine similarity of 0.60" in found
    assert "those of GFSA (0.30) are less alike" in found
    same = headline([reading("plain", 0.6), reading("GFSA", 0.61, [-0.2, 1.0, 0.1])]).compares[0]
    assert "those of GFSA (0.61) are about as alike" in same
    more = headline([reading("plain", 0.6), reading("GFSA", 0.8, [-0.2, 1.0, 0.1])]).compares[0]
    assert "those of GFSA (0.80) are more alike" in more


def test_filters_that_hardly_moved_want_a_larger_rate() -> None:
    plain = reading("plain", 0.6)
    assert "hardly moved (at most 0.004" in advice(plain, reading("GFSA", 0.6, [0.004, 1.0, 0.0]))
    assert "filter_lr" in advice(plain, reading("GFSA", 0.6, [0.004, 1.0, 0.0]))
    assert "hardly" not in advice(plain, reading("GFSA", 0.6, [0.4, 1.0, 0.0]))
    assert "too high" in advice(plain, reading("GFSA", 0.3, [0.4, 11.0, 0.0]))
    assert "as alike as without" in advice(plain, reading("GFSA", 0.6, [0.4, 1.0, 0.0]))
    assert "fixed" in advice(plain, reading("twicing", 0.3, [0.0, 2.0, -1.0], learned=0))


def test_the_same_advice_is_given_once() -> None:
    still = [0.0, 1.0, 0.001]
    found = advice(reading("plain", 0.6), reading("a", 0.6, still), reading("b", 0.6, still))
    assert "a and b: the filters hardly moved" in found
    assert found.count("hardly") == 1


def test_without_filters_the_advice_is_about_plugging() -> None:
    assert "layers=range(1," in advice(reading("bert", 0.95))
    assert "no sign of over-smoothing" in advice(reading("bert", 0.3))


def test_the_plain_model_of_a_comparison_has_a_verdict() -> None:
    filtered = reading("GFSA", 0.3, [0.4, 1.0, 0.0])
    assert "plain: no sign of over-smoothing" in advice(filtered, reading("plain", 0.3))
    assert "plain: tokens are alike from layer 1 on" in advice(filtered, reading("plain", 0.95))


def test_coefficients_over_training_have_a_sentence() -> None:
    layer = LayerTrajectory(1, "a", [[[0.0, 1.0], [0.0, 1.0]], [[-0.5, 1.5], [0.25, 1.0]]])
    (found,) = headline([], {"run": Trajectory([0, 1500], [layer])}).compares
    assert "over 1,500 steps" in found
    assert "from (0.00, 1.00) to (−0.12, 1.25)" in found
    assert "1 of 2 heads" in found


def test_a_gain_alone_is_not_counted_by_its_c0() -> None:
    layer = LayerTrajectory(1, "a", [[[0.0, 1.0]], [[0.0, 1.5]]])
    gain = {"gain only": Trajectory([0, 100], [layer])}
    (found,) = headline([], gain).compares
    assert found.endswith("to (0.00, 1.50); c0 is 0 in every head.")
    # a report without a date
    report = LensReport({}, trajectories=gain)
    assert f"Made by gfsa {report.version}. Only valid" in render(report)


def test_the_page_of_trajectories_alone_asks_about_training() -> None:
    layer = LayerTrajectory(1, "a", [[[0.0, 1.0]], [[0.0, 1.5]]])
    paths = {"run": Trajectory([0, 100], [layer])}
    alone = render(LensReport({}, trajectories=paths))
    assert "<h1>How did training move the filters?</h1>" in alone
    assert "over-smooth" not in alone.partition("<main>")[0].partition("<body>")[2]
    measured = render(LensReport({"plain": reading("plain", 0.5)}, trajectories=paths))
    assert "<h1>Does it over-smooth, where, and what do the filters change?</h1>" in measured


def test_modules_with_the_same_reason_share_a_line() -> None:
    skipped = {f"layers.{at}.attn": "has no map" for at in range(12)} | {"head": "is crossed"}
    model = reading("plain", 0.5)
    model.skipped = skipped
    page = render(LensReport({"plain": model}))
    # once in the summary, twelve times in the data
    assert page.count("has no map") == 1 + 12


@pytest.mark.parametrize(
    ("names", "numbers"),
    [
        (["plain", "degree 1", "GFSA K=3"], [0, 2, 1]),
        (["gfsa", "plain"], [1, 0]),
        (["degree1"], [2]),
        (["GFSA <all>", "gfsa-even", "plain"], [1, 3, 0]),
        (["bert", "vit"], [3, 4]),
    ],
)
def test_a_method_has_one_colour_in_any_company(names: list[str], numbers: list[int]) -> None:
    assert series_of(names) == numbers


def test_colours_are_not_repeated_before_all_are_used() -> None:
    names = [f"model {at}" for at in range(7)] + ["plain"]
    assert sorted(series_of(names)) == list(range(len(COLOURS)))
    assert set(series_of([*names, "one more"])) == set(range(len(COLOURS)))
