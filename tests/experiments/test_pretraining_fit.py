"""What the study of pretraining computes: the gap and its fit, savings, breakdowns, probes."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from gfsa_experiments.results.page_blocks import to_markdown
from gfsa_experiments.results.pretraining.between import loss_after, tokens_to_reach
from gfsa_experiments.results.pretraining.collect import RUN
from gfsa_experiments.results.pretraining.fit_words import fit_sentence, vanishing
from gfsa_experiments.results.pretraining.gap import Cell, cells, fit_gap
from gfsa_experiments.results.pretraining.page import (
    probes_by_length,
    saving_sentence,
    stability_blocks,
)
from gfsa_experiments.results.pretraining.probes import at_loss, measures
from gfsa_experiments.results.pretraining.savings import savings, savings_of_ends
from gfsa_experiments.results.pretraining.stability import breakdowns
from gfsa_experiments.results.pretraining.study import Study
from gfsa_experiments.results.statistics import paired_difference
from support.pretraining_runs import curve, probe_lines, runs


def test_a_gap_that_goes_to_zero_is_fitted() -> None:
    found = cells(runs({"46M": (1, 3), "15M": (1, 3, 10)}, lambda x: -0.3 * x**-0.75), "GFSA")
    # smaller models first, and every seed cancels plain's own difference
    assert [cell.size for cell in found] == ["15M"] * 3 + ["46M"] * 2
    assert found[0].gaps == pytest.approx([-0.3, -0.3])
    fit = fit_gap(found)
    assert fit is not None
    assert (fit.scale, fit.decay) == pytest.approx((-0.3, 0.75), rel=1e-6)
    assert fit.at(10).mean == pytest.approx(-0.3 * 10**-0.75)
    assert "cannot be asked of fewer than 4 points" in fit_sentence("GFSA", found)


def test_a_floor_is_found_and_said() -> None:
    lengths = {"15M": (1, 2, 5, 10, 20)}
    found = cells(runs(lengths, lambda x: -0.05 - 0.3 / x, (0, 1, 2, 3), noise=1e-4), "GFSA")
    fit = fit_gap(found)
    assert fit is not None
    assert fit.floor is not None
    assert fit.floor.mean == pytest.approx(-0.05, abs=2e-3)
    assert "Not within this fit: a curve with a floor has it at −0.05" in fit_sentence(
        "GFSA", found
    )
    found = cells(runs(lengths, lambda x: -0.3 / x, range(6), noise=1e-3), "GFSA")
    assert "Not known: a curve with a floor has it at" in fit_sentence("GFSA", found)
    assert "which has 0 in it" in fit_sentence("GFSA", found)
    found = cells(runs(lengths, lambda x: -0.3 / x, (0,)), "GFSA")
    assert "without an interval (no cell has two seeds)" in fit_sentence("GFSA", found)


def test_the_first_page_says_whether_the_gap_vanishes() -> None:
    lengths = {"15M": (1, 2, 5, 10, 20)}
    with_floor = runs(lengths, lambda x: -0.05 - 0.3 / x, (0, 1, 2, 3), noise=1e-4)
    said = vanishing(with_floor)
    assert "Not within the fit of GFSA: at 15M, over 1.0 to 20.0 tokens" in said
    assert "has it at −0.05" in said
    said = vanishing(runs(lengths, lambda x: -0.3 / x, range(6), noise=1e-3))
    assert "Not known: at 15M, over 1.0 to 20.0" in said
    assert "for GFSA, with 0 in it" in said
    assert "without an interval" in vanishing(runs(lengths, lambda x: -0.3 / x, (0,)))
    few = vanishing(runs({"15M": (1, 3, 10)}, lambda x: -0.3 / x))
    assert few.endswith("Not known: there are too few lengths for a curve with a floor.")
    assert vanishing(pd.DataFrame()) == few


def test_a_power_at_the_edge_is_said() -> None:
    found = cells(runs({"15M": (1, 3, 10)}, lambda x: -0.3), "GFSA")
    assert "GFSA − plain at 15M, fitted by −0.300·x^0.00" in fit_sentence("GFSA", found)
    assert "No power beyond 0.00 was tried" in fit_sentence("GFSA", found)


def test_a_larger_size_does_not_move_the_fit() -> None:
    small = runs({"15M": (1, 3, 10, 20)}, lambda x: -0.3 / x, range(6), noise=1e-3)
    both = pd.concat([small, runs({"46M": (1, 3, 10)}, lambda x: -0.1 / x)])
    found = cells(both, "GFSA")
    assert {cell.size for cell in found} == {"15M", "46M"}
    assert fit_sentence("GFSA", found) == fit_sentence("GFSA", cells(small, "GFSA"))
    assert vanishing(both) == vanishing(small)


def test_a_length_counts_as_often_as_it_has_pairs() -> None:
    """Six pairs are six times one pair: the fit is that of six lengths of one pair each."""
    lengths, law = {"15M": (1, 3, 10)}, lambda x: -0.3 / x
    six = cells(runs(lengths, law, range(6)), "GFSA")
    (off,) = cells(runs({"46M": (1.1,)}, lambda x: -0.1, (0,)), "GFSA")
    fit = fit_gap([*six, off])
    repeated = fit_gap([*six, *[off] * 6])
    assert fit is not None
    assert repeated is not None
    # the more the stray length counts, the further the fit lies from the law of the others
    assert -0.3 < fit.at(1).mean < repeated.at(1).mean < -0.1
    single = [cell for cell in cells(runs(lengths, law, (0,)), "GFSA") for _ in range(6)]
    alike = fit_gap([*single, off])
    assert alike is not None
    assert (fit.scale, fit.decay) == pytest.approx((alike.scale, alike.decay))
    assert "each length weighted by its pairs: 6, 6 and 6)" in fit_sentence("GFSA", [*six, off])


def test_two_lengths_are_no_fit() -> None:
    # 3.0 and 3.1 tokens per parameter are one point of the curve
    found = cells(runs({"15M": (1, 3), "46M": (3.1,)}, lambda x: -0.3 / x), "GFSA")
    assert fit_gap(found) is None
    assert "no fit. It needs 3 numbers of tokens per parameter" in fit_sentence("GFSA", found)
    assert "there are 1.0, 3.0." in fit_sentence("GFSA", found)


def test_a_seed_without_its_pair_does_not_count() -> None:
    table = runs({"15M": (1,)}, lambda x: -0.3, (0, 1, 2))
    table = table[~((table.arm == "plain") & (table.seed == 1))]
    (cell,) = cells(table, "GFSA")
    assert cell.seeds == (0, 2)
    assert cells(table, "degree 1") == []


def cells_with_noise(
    design: dict[float, int], scale: float, spread: float, random: np.random.Generator
) -> list[Cell]:
    """Cells of ``scale``/ratio; the spread of a pair grows with the gap, by a twentieth of it."""
    found = []
    for ratio, seeds in design.items():
        truth = scale / ratio
        own = 0.05 * abs(truth) + spread
        values = {seed: truth + own * random.normal() for seed in range(seeds)}
        pair = paired_difference(dict.fromkeys(values, 0.0), values, False)
        assert pair is not None
        found.append(Cell("15M", 1, ratio, pair.seeds, pair.values, pair.interval))
    return found


def test_intervals_of_the_fit_have_their_coverage() -> None:
    """The design of the plans: two seeds of short runs, six of the longest; noise as in pilots."""
    random, covered, rounds = np.random.default_rng(3), 0, 60
    for _ in range(rounds):
        fit = fit_gap(cells_with_noise({1.0: 2, 3.4: 2, 10.2: 6}, -0.2, 0.008, random), draws=200)
        assert fit is not None
        low, high = fit.at(10.2).low, fit.at(10.2).high
        assert low is not None
        assert high is not None
        covered += low <= -0.2 / 10.2 <= high
    # 95 % is meant; of 60 rounds 53 or fewer would be a surprise of 4 in 100
    assert covered > 53


def test_intervals_of_the_floor_have_their_coverage() -> None:
    """The lengths and pairs of the study, and a gap that goes to zero."""
    random, covered, rounds = np.random.default_rng(5), 0, 60
    for _ in range(rounds):
        design = {1.0: 2, 2.0: 2, 3.4: 6, 10.2: 6}
        fit = fit_gap(cells_with_noise(design, -0.095, 0.007, random), draws=200)
        assert fit is not None
        assert fit.floor is not None
        assert fit.floor.low is not None
        covered += not fit.floor.excludes_zero
    assert covered > 53


def test_what_is_saved_is_what_was_put_in() -> None:
    table = runs({"15M": (10,)}, lambda x: -0.1, (0, 1))
    points = np.geomspace(1e7, 1.5e8, 10)
    lines = [curve("15M", "plain", seed, points, lambda t: 9 - math.log(t) / 3) for seed in (0, 1)]
    for seed, share in ((0, 0.8), (1, 0.7)):
        lines.append(
            curve("15M", "GFSA", seed, points, lambda t, s=share: 9 - math.log(t / s) / 3)  # type: ignore[misc]
        )
    speeds = {("15M", "plain", 32): 2.0e6, ("15M", "GFSA", 32): 1.6e6, ("15M", "plain", 64): 9e6}
    (found,) = savings(pd.concat(lines), table, "GFSA", speeds)
    assert found.shares == pytest.approx({0: 0.8, 1: 0.7})
    assert found.share is not None
    assert found.time is not None
    assert found.share.mean == pytest.approx(0.75)
    assert found.time.mean == pytest.approx(0.75 * 1.25)
    text = saving_sentence(found, {2.0: 0.5, 10.0: 0.6})
    assert "150M tokens, 2 seeds: GFSA is at plain's final validation loss after 75 %" in text
    assert "94 % (" in text
    assert "after 2.0 and 10.0 tokens per parameter takes 50 and 60 % of the tokens" in text
    assert "and 62 and 75 % of the time." in text
    # a speed that was measured at another batch size for one of the two is no ratio
    del speeds["15M", "plain", 32]
    (found,) = savings(pd.concat(lines), table, "GFSA", speeds)
    assert found.time is None
    assert "the time of its step was not measured" in saving_sentence(found, {})


def test_a_loss_that_is_never_reached_has_no_share() -> None:
    table = runs({"15M": (10,)}, lambda x: 0.1, (0,))
    lines = [curve("15M", "plain", 0, (1e7, 1.5e8), lambda t: 9 - math.log(t) / 3)]
    lines.append(curve("15M", "GFSA", 0, (1e7, 1.5e8), lambda t: 9.1 - math.log(t) / 3))
    (found,) = savings(pd.concat(lines), table, "GFSA", {})
    assert found.share is None
    assert "with 0 of 1 seeds, so no mean is given" in saving_sentence(found, {})
    assert tokens_to_reach([1, 2], [3.0, 2.5], 2.0) is None


def test_plain_may_have_trained_for_longer() -> None:
    """As the control of equal time, of which no filtered run sees as many tokens."""
    table = runs({"15M": (3, 5, 10, 11.5)}, lambda x: math.log(0.7) / 5)
    table = table[~((table.arm == "GFSA") & (table.ratio == 11.5))]
    assert max(savings_of_ends(table, "GFSA", "15M")) == 10
    assert [cell.ratio for cell in cells(table, "GFSA")] == [3, 5, 10]


def test_ends_of_whole_schedules_are_interpolated() -> None:
    # GFSA ends with 0.7 of the tokens where plain ends
    table = runs({"15M": (3, 5, 10)}, lambda x: math.log(0.7) / 5)
    # before the shortest of its runs nothing is known
    expected = {5: 0.7, 10: 0.7}
    assert savings_of_ends(table, "GFSA", "15M") == pytest.approx(expected, rel=1e-6)
    assert savings_of_ends(table[table.ratio == 10], "GFSA", "15M") == {}
    # between 3 and 10 the loss bends in a way that two points do not tell
    far = savings_of_ends(table[table.ratio != 5], "GFSA", "15M")
    assert far == {}
    # worse than plain at every length: the longest is never reached
    assert list(savings_of_ends(runs({"15M": (1, 2)}, lambda x: 0.1), "GFSA", "15M")) == [1]


def test_breakdowns_are_counted() -> None:
    ends = {"plain": (2.1, 5.3, math.nan, 9.0, 4.0), "GFSA": (2.0, 2.1, 2.2, 2.9, 2.3)}
    table = pd.DataFrame(
        [{"arm": arm, "valid": loss} for arm, losses in ends.items() for loss in losses]
    )
    plain, filtered = breakdowns(table)
    assert (plain.broken, plain.runs, plain.worst, plain.p) == (4, 5, 2.1, None)
    assert (filtered.broken, filtered.worst) == (0, 2.9)
    assert filtered.p == pytest.approx(0.0476, abs=1e-4)
    # 1 − 0.025^(1/5)
    assert (filtered.low, filtered.high) == pytest.approx((0, 0.5218), abs=1e-4)
    page = to_markdown(stability_blocks(table))
    assert "| plain | 4 of 5 | 28–99 % | – | 2.100 |" in page
    assert "| GFSA | 0 of 5 | 0–52 % | 0.048 | 2.900 |" in page


def test_probes_are_paired_by_seed() -> None:
    lines = []
    for seed, more in ((0, -0.1), (1, -0.3), (2, -0.2)):
        lines += probe_lines("plain", seed, 0.5 * seed) + probe_lines(
            "GFSA", seed, 0.5 * seed + more
        )
    lines += probe_lines("GFSA", 7, 50.0)
    found = {measure.name: measure for measure in measures(pd.DataFrame(lines))}
    induction = found["loss, repeated random tokens, second time"]
    assert induction.plain == pytest.approx(1.5)
    assert induction.differences["GFSA"].seeds == (0, 1, 2)
    assert induction.differences["GFSA"].values == pytest.approx([-0.1, -0.3, -0.2])
    assert induction.differences["GFSA"].low == pytest.approx(
        -0.2 - 4.3027 * 0.1 / 3**0.5, rel=1e-4
    )
    assert found["loss, recalled pairs, second time"].differences["GFSA"].mean == pytest.approx(
        -0.4
    )
    assert found["loss, tokens 1–15"].plain == pytest.approx((8 + 14 * 5) / 15)
    assert found["loss, tokens 16–127"].plain == pytest.approx(4.0)
    assert found["loss, tokens from 128 on"].plain == pytest.approx(3.5)
    assert found["loss, rarest tenth of tokens"].plain == pytest.approx(6.5)
    assert found["entropy of attention, share of its maximum"].plain == pytest.approx(0.3)
    # sinks of 0.1, 0.2, 0.1, 0.4
    assert found["attention on the first token"].plain == pytest.approx(0.2)
    assert found["heads with more than 0.3 of it there"].plain == pytest.approx(0.25)


def test_probes_of_two_lengths_are_not_mixed() -> None:
    lines = pd.DataFrame(probe_lines("plain", 0, 0.0))
    with pytest.raises(ValueError, match="two runs of plain with seed 0 have probes"):
        measures(pd.concat([lines, lines.assign(settings="epochs=3.0")]))


def test_probes_over_lengths_are_read_where_plain_has_the_same_loss() -> None:
    # GFSA ends where plain ends with 1.5 times the tokens, and copies as plain does there
    table = runs({"15M": (1, 2, 6)}, lambda x: -math.log(1.5) / 5)
    lines = []
    for run in table.to_dict("records"):
        more = run["test"] - 0.1 * run["seed"]
        own = {name: run[name] for name in RUN}
        lines += [{**line, **own} for line in probe_lines(run["arm"], run["seed"], more)]
    none = pd.DataFrame()
    probes = pd.DataFrame(lines)
    page = to_markdown(probes_by_length(Study(table, none, probes, none, none, [])))
    name = "loss, repeated random tokens, second time"
    assert f"| {name} | 1.0 | 5.000 | −0.08 | +0.00 |" in page
    # plain has this loss between 2 and 6 tokens per parameter, which are too far apart
    assert f"| {name} | 2.0 | 4.861 | −0.08 | – |" in page
    # plain never has the loss of GFSA's longest runs
    assert f"| {name} | 6.0 | 4.642 | −0.08 | – |" in page
    # of runs whose probes are fewer, those are shown that all lengths have
    fewer = probes[~probes.probe.str.startswith("induction")]
    page = to_markdown(probes_by_length(Study(table, none, fewer, none, none, [])))
    assert name not in page
    assert "| loss, recalled pairs, second time | 1.0 |" in page
    entropy = probes[probes.probe == "entropy"]
    assert probes_by_length(Study(table, none, entropy, none, none, [])) == []


def test_a_line_is_read_between_near_lengths_alone() -> None:
    plain = [(2e7, 2.0, 5.0), (1e7, 3.0, 7.0), (5e7, 1.0, 0.0)]
    assert at_loss(plain, 2.5) == pytest.approx(6.0)
    assert at_loss(plain, 3.1) is None
    assert at_loss(plain, 1.5) is None
    assert loss_after([10, 20, 50], [3.0, 2.0, 1.0], 200**0.5) == pytest.approx(2.5)
    assert loss_after([10, 20, 50], [3.0, 2.0, 1.0], 30) is None
    # where a validation was made, none is needed on the other side
    assert loss_after([10, 20, 50], [3.0, 2.0, 1.0], 50) == 1.0
    assert loss_after([10, 20, 50], [3.0, 2.0, 1.0], 9) is None
    assert tokens_to_reach([10, 20, 50], [3.0, 2.0, 1.0], 2.5) == pytest.approx(200**0.5)
    assert tokens_to_reach([10, 20, 50], [3.0, 2.0, 1.0], 1.5) is None
    assert tokens_to_reach([10, 20, 50], [3.0, 2.0, 1.0], 1.0) == 50
