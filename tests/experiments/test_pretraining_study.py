"""The study of pretraining, from rows and curves whose answer is known."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from gfsa_experiments.commands.train import runs_of_plan
from gfsa_experiments.results.families import read_family
from gfsa_experiments.results.page_blocks import to_markdown
from gfsa_experiments.results.pretraining.answer import answer
from gfsa_experiments.results.pretraining.collect import write_tables
from gfsa_experiments.results.pretraining.figure import draw
from gfsa_experiments.results.pretraining.gap import Cell, cells, fit_gap
from gfsa_experiments.results.pretraining.page import (
    blocks,
    fit_sentence,
    saving_sentence,
    stability_blocks,
)
from gfsa_experiments.results.pretraining.probes import measures
from gfsa_experiments.results.pretraining.savings import (
    saving_of_ends,
    savings,
    tokens_to_reach,
)
from gfsa_experiments.results.pretraining.stability import breakdowns
from gfsa_experiments.results.pretraining.study import (
    Study,
    arm_of,
    read_speeds,
    read_study,
    speeds_of,
)
from gfsa_experiments.results.pretraining.write import write
from gfsa_experiments.results.statistics import paired_difference
from gfsa_experiments.runs.row import Row, append_rows
from gfsa_experiments.runs.run import Key
from gfsa_experiments.tasks.pretrain.recipe import PretrainConfig

RESULTS = Path(__file__).parents[2] / "results"
PARAMETERS = {"15M": 15_000_000, "46M": 46_000_000, "110M": 110_000_000}
Law = Callable[[float], float]


@pytest.fixture(autouse=True)
def _without_sketches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether methods fit models is tested with the plans; here it would take most of the time."""
    monkeypatch.setattr(PretrainConfig, "sketch", lambda config: None)


def runs(
    lengths: dict[str, Sequence[float]], gap: Law, seeds: Sequence[int] = (0, 1), noise: float = 0.0
) -> pd.DataFrame:
    """Runs of plain, whose loss is 4 − log(tokens per parameter)/5, and of GFSA, ``gap`` from it.

    Args:
        lengths: tokens per parameter by size.
    """
    random = np.random.default_rng(0)
    rows = []
    for size, ratios in lengths.items():
        for ratio in ratios:
            for seed in seeds:
                plain = 4 - math.log(ratio) / 5 + 0.1 * seed
                end = plain + gap(ratio) + noise * random.normal()
                for arm, loss in (("plain", plain), ("GFSA", end)):
                    row = {"arm": arm, "size": size, "seed": seed, "test": loss, "valid": loss}
                    row |= {"parameters": PARAMETERS[size], "ratio": ratio, "batch_size": 32}
                    row |= {"tokens": round(ratio * PARAMETERS[size]), "task": size}
                    row |= {"method": arm, "options": "", "settings": f"ratio={ratio}"}
                    rows.append(row)
    return pd.DataFrame(rows)


# the gap


def test_a_gap_that_goes_to_zero_is_fitted() -> None:
    found = cells(runs({"46M": (1, 3), "15M": (1, 3, 10)}, lambda x: -0.3 * x**-0.75), "GFSA")
    # smaller models first, and every seed cancels plain's own difference
    assert [cell.size for cell in found] == ["15M"] * 3 + ["46M"] * 2
    assert found[0].gaps == pytest.approx([-0.3, -0.3])
    fit = fit_gap(found)
    assert fit is not None
    assert (fit.scale, fit.decay) == pytest.approx((-0.3, 0.75), rel=1e-6)
    assert fit.at(10).mean == pytest.approx(-0.3 * 10**-0.75)
    assert fit.residuals == pytest.approx({"15M": 0, "46M": 0}, abs=1e-9)
    # without 15M there are two points, which make no fit
    assert list(fit.without) == ["46M"]
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
    found = cells(runs(lengths, lambda x: -0.3 / x, (0, 1, 2, 3), noise=1e-3), "GFSA")
    assert "Not known: a curve with a floor has it at" in fit_sentence("GFSA", found)
    assert "which has 0 in it" in fit_sentence("GFSA", found)
    found = cells(runs(lengths, lambda x: -0.3 / x, (0,)), "GFSA")
    assert "without an interval (no cell has two seeds)" in fit_sentence("GFSA", found)


def test_a_power_at_the_edge_is_said() -> None:
    found = cells(runs({"15M": (1, 3, 10)}, lambda x: -0.3), "GFSA")
    assert "fitted by −0.300·x^0.00" in fit_sentence("GFSA", found)
    assert "No power beyond 0.00 was tried" in fit_sentence("GFSA", found)


def test_sizes_that_disagree_are_seen() -> None:
    both = runs({"15M": (1, 3, 10)}, lambda x: -0.3 / x)
    both = pd.concat([both, runs({"46M": (1, 3, 10)}, lambda x: -0.1 / x)])
    fit = fit_gap(cells(both, "GFSA"))
    assert fit is not None
    assert fit.at_without(1)["15M"] == pytest.approx(-0.1, rel=1e-3)
    assert fit.at_without(1)["46M"] == pytest.approx(-0.3, rel=1e-3)
    assert fit.residuals["15M"] < 0 < fit.residuals["46M"]


def test_two_lengths_are_no_fit() -> None:
    # 3.0 and 3.1 tokens per parameter are one point of the curve
    found = cells(runs({"15M": (1, 3), "46M": (3.1,)}, lambda x: -0.3 / x), "GFSA")
    assert fit_gap(found) is None
    assert "no fit. It needs 3 numbers of tokens per parameter" in fit_sentence("GFSA", found)
    assert "there are 1.0, 3.0, 3.1" in fit_sentence("GFSA", found)


def test_a_seed_without_its_pair_does_not_count() -> None:
    table = runs({"15M": (1,)}, lambda x: -0.3, (0, 1, 2))
    table = table[~((table.arm == "plain") & (table.seed == 1))]
    (cell,) = cells(table, "GFSA")
    assert cell.seeds == (0, 2)
    assert cells(table, "degree 1") == []


def test_intervals_of_the_fit_have_their_coverage() -> None:
    """The design of the plans: two seeds of short runs, six of the longest; noise as in pilots."""
    random, covered, rounds = np.random.default_rng(3), 0, 60
    design = {1.0: 2, 3.4: 2, 10.2: 6}
    for _ in range(rounds):
        found = []
        for ratio, seeds in design.items():
            truth = -0.2 / ratio
            values = {
                seed: truth + (0.05 * -truth + 0.008) * random.normal() for seed in range(seeds)
            }
            pair = paired_difference(dict.fromkeys(values, 0.0), values, False)
            assert pair is not None
            found.append(Cell("15M", 1, ratio, pair.seeds, pair.values, pair.interval))
        fit = fit_gap(found, draws=200)
        assert fit is not None
        low, high = fit.at(10.2).low, fit.at(10.2).high
        assert low is not None
        assert high is not None
        covered += low <= -0.2 / 10.2 <= high
    # 95 % is meant; of 60 rounds 53 or fewer would be a surprise of 4 in 100
    assert covered > 53


# tokens and time


def curve(size: str, arm: str, seed: int, tokens: Sequence[float], loss: Law) -> pd.DataFrame:
    lines = pd.DataFrame({"tokens": list(tokens), "valid loss": [loss(t) for t in tokens]})
    return lines.assign(
        task=size, method=arm, options="", settings="ratio=10", seed=seed, arm=arm, size=size
    )


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
    text = saving_sentence(found, 0.6)
    assert "150M tokens, 2 seeds: GFSA is at plain's final validation loss after 75 %" in text
    assert "94 % (" in text
    assert "after 60 % of the tokens, 75 % of the time." in text
    # a speed that was measured at another batch size for one of the two is no ratio
    del speeds["15M", "plain", 32]
    (found,) = savings(pd.concat(lines), table, "GFSA", speeds)
    assert found.time is None
    assert "the time of its step was not measured" in saving_sentence(found, None)


def test_a_loss_that_is_never_reached_has_no_share() -> None:
    table = runs({"15M": (10,)}, lambda x: 0.1, (0,))
    lines = [curve("15M", "plain", 0, (1e7, 1.5e8), lambda t: 9 - math.log(t) / 3)]
    lines.append(curve("15M", "GFSA", 0, (1e7, 1.5e8), lambda t: 9.1 - math.log(t) / 3))
    (found,) = savings(pd.concat(lines), table, "GFSA", {})
    assert found.share is None
    assert "with 0 of 1 seeds, so no mean is given" in saving_sentence(found, None)
    assert tokens_to_reach([1, 2], [3.0, 2.5], 2.0) is None


def test_plain_may_have_trained_for_longer() -> None:
    """As the control of equal time, of which no filtered run sees as many tokens."""
    table = runs({"15M": (1, 3, 10, 11.5)}, lambda x: math.log(0.7) / 5)
    table = table[~((table.arm == "GFSA") & (table.ratio == 11.5))]
    assert saving_of_ends(table, "GFSA", "15M") == pytest.approx(0.7, rel=1e-6)
    assert [cell.ratio for cell in cells(table, "GFSA")] == [1, 3, 10]


def test_ends_of_whole_schedules_are_interpolated() -> None:
    # GFSA ends with 0.7 of the tokens where plain ends
    table = runs({"15M": (1, 3, 10)}, lambda x: math.log(0.7) / 5)
    assert saving_of_ends(table, "GFSA", "15M") == pytest.approx(0.7, rel=1e-6)
    assert saving_of_ends(table[table.ratio == 10], "GFSA", "15M") is None
    assert saving_of_ends(runs({"15M": (1, 3)}, lambda x: 0.1), "GFSA", "15M") is None


def test_the_time_axis_has_the_batch_size_of_the_runs_that_are_drawn() -> None:
    table = runs({"15M": (1, 10)}, lambda x: -0.1, (0,))
    table.loc[table.ratio == 1, "batch_size"] = 16
    lines = [
        curve("15M", arm, 0, (1e7, 1.5e8), lambda t: 9 - math.log(t) / 3)
        for arm in ("plain", "GFSA")
    ]
    none = pd.DataFrame()
    study = Study(table, pd.concat(lines), none, none, none, [])
    speeds = {("15M", arm, 16): 1e6 for arm in ("plain", "GFSA")}
    speeds |= {("15M", "plain", 32): 2.0e6, ("15M", "GFSA", 32): 1.5e6}
    by_time = draw(study, speeds, None).axes[1]
    ends = [float(np.max(line.get_xdata())) for line in by_time.lines]
    assert ends == pytest.approx([75, 100])


# stability


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


# probes


def probe_lines(arm: str, seed: int, more: float) -> list[dict[str, Any]]:
    """Losses are those of plain and ``more``; attention is the same but for a sink."""
    values = {
        "induction first": [9.0],
        "induction second": [1.0 + more],
        "recall first": [9.0],
        "recall second": [3.0 + 2 * more],
        # tokens 1; 2–3; 4–7; 8–15; … 128–255; and what is left of the next group
        "position": [8.0, 5.0, 5.0, 5.0, 4.0, 4.0, 4.0, 3.0 + more, 99.0],
        "frequency": [6.0 + more, *[2.0] * 8, 1.0],
    }
    run = {"task": "15M", "method": arm, "options": "", "settings": "", "seed": seed, "arm": arm}
    lines = [{**run, "probe": name, "values": text(v)} for name, v in values.items()]
    for layer in (1, 2):
        lines.append({**run, "probe": "entropy", "layer": layer, "values": "0.2 0.4"})
        lines.append({**run, "probe": "sink", "layer": layer, "values": f"0.1 {0.2 * layer}"})
    return lines


def text(values: Sequence[float]) -> str:
    return " ".join(map(str, values))


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


# from files


def test_arms_have_names() -> None:
    assert arm_of("plain", "", "lr=0.002") == "plain"
    assert arm_of("plain", "", "lr=0.002 gate=True") == "gated"
    assert arm_of("plain", "", "depth=9") == "plain, 9 layers"
    assert arm_of("gfsa", "learn=w1 filter_lr=0.1", "") == "gain only"
    assert arm_of("gfsa", "layers=upper filter_lr=0.1", "") == "GFSA, upper layers"
    assert arm_of("degree1", "filter_lr=0.1", "lr=0.002") == "degree 1"


COMMON = "common --set size=15m --set batch_size=32 --set gain_lr=0.1"
PLAN = f"""{COMMON}
pretrain --method plain --each epochs=0.3,1,3 --seeds 0-1
pretrain --method gfsa --set filter_lr=0.1 --each epochs=0.3,1,3 --seeds 0-1
"""
FAMILY = """
registered = 2026-01-01T00:00:00Z
recipe = "pretrain"
metric = "loss"
seeds = "100-101"
settings = "size=15m batch_size=32 gain_lr=0.1 epochs=3"
[lines]
plain = "plain"
gfsa = "gfsa filter_lr=0.1"
[[comparison]]
a = "gfsa"
b = "plain"
"""


def row(key: Key, gap: float) -> Row:
    steps = {"0.3": 480, "3.0": 4800}.get(key.settings.partition("epochs=")[2].split(" ")[0], 1600)
    plain = 3 - steps / 4800
    return Row(
        **key._asdict(),
        metric="loss",
        higher_is_better=False,
        test=plain if key.method == "plain" else plain + gap,
        valid=plain if key.method == "plain" else plain + gap,
        steps=steps,
        parameters=15_000_120 if key.method == "gfsa" else 15_000_000,
        added=120 if key.method == "gfsa" else 0,
        commit="abc",
        date="2026-02-01T00:00:00+00:00",
        data="10+10+10 abc",
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of results: two seeds of three lengths, and a family without its runs."""
    for name in ("plans", "families", "tuning"):
        (tmp_path / name).mkdir()
    (tmp_path / "plans/pretrain-scaling-15m.txt").write_text(PLAN)
    (tmp_path / "families/pretrain.toml").write_text(FAMILY)
    keys = [run.key() for run in runs_of_plan(tmp_path / "plans/pretrain-scaling-15m.txt")]
    # a run that no plan asks for
    stray = keys[0]._replace(settings=f"{keys[0].settings} weight_decay=0.2")
    append_rows(tmp_path / "tuning/pretrain.csv", [row(key, -0.1) for key in [*keys, stray]])
    return tmp_path


def add_family_runs(folder: Path, methods: Sequence[str]) -> None:
    keys = sorted(read_family(folder / "families/pretrain.toml").keys)
    own = [row(key, -0.5) for key in keys if key.method in methods]
    append_rows(folder / "pretrain.csv", own)


def test_the_plans_choose_the_runs(folder: Path) -> None:
    study = read_study(folder)
    assert len(study.runs) == 12
    assert set(study.runs["size"]) == {"15M"}
    assert sorted(study.runs.tokens.unique()) == [n * 32 * 1024 for n in (480, 1600, 4800)]
    assert study.runs.parameters.unique().tolist() == [15_000_000]
    (sentence,) = study.missing
    assert sentence.startswith("The family pretrain has 0 of its 4 runs")
    page = to_markdown(blocks(study, {}))
    assert "| 15M | 157M | 10.5 | 2 | 2.000 | −0.100 |" in page


def test_a_family_is_not_read_before_its_last_run(folder: Path) -> None:
    add_family_runs(folder, ["plain"])
    study = read_study(folder)
    assert study.runs.seed.max() < 100
    assert "has 2 of its 4 runs; nothing is read from them before the last" in study.missing[0]
    add_family_runs(folder, ["gfsa"])
    study = read_study(folder)
    assert study.missing == []
    # at its length the family's fresh seeds alone count
    found = {cell.tokens: cell for cell in cells(study.runs, "GFSA")}
    assert found[4800 * 32 * 1024].seeds == (100, 101)
    assert found[4800 * 32 * 1024].mean == pytest.approx(-0.5)
    assert found[1600 * 32 * 1024].seeds == (0, 1)


def test_a_family_with_local_changes_is_not_read(folder: Path) -> None:
    add_family_runs(folder, ["plain", "gfsa"])
    table = (folder / "pretrain.csv").read_text()
    (folder / "pretrain.csv").write_text(table.replace(",abc,", ",abc-dirty,"))
    study = read_study(folder)
    assert study.runs.seed.max() < 100
    assert "some pairs do not count: `gfsa results --family pretrain` says why" in study.missing[0]


def test_runs_on_other_data_are_not_compared(folder: Path) -> None:
    table = (folder / "tuning/pretrain.csv").read_text()
    (folder / "tuning/pretrain.csv").write_text(table.replace("10+10+10 abc", "9+9+9 def", 3))
    with pytest.raises(ValueError, match=r"on different data \(10\+10\+10 abc; 9\+9\+9 def\)"):
        read_study(folder)


def test_what_diverged_is_said(folder: Path) -> None:
    table = pd.read_csv(folder / "tuning/pretrain.csv", keep_default_na=False)
    chosen = (table.method == "gfsa") & (table.seed == 1) & (table.steps == 480)
    table.loc[chosen, "test"] = math.nan
    table.to_csv(folder / "tuning/pretrain.csv", index=False, na_rep="nan")
    study = read_study(folder)
    assert "15M GFSA, seed 1: the run diverged and is left out." in study.missing
    assert cells(study.runs, "GFSA")[0].seeds == (0,)


def test_everything_is_written_from_files(folder: Path) -> None:
    """Page, figures and lens page, with curves, probes and coefficients of two lengths."""
    study = read_study(folder)
    tables: dict[str, list[dict[str, str]]] = {"curves": [], "probes": [], "coefficients": []}
    for run in study.runs.to_dict("records"):
        labels = {
            name: str(run[name]) for name in ("task", "method", "options", "settings", "seed")
        }
        for share in (0.5, 1.0):
            point = {"step": int(share * run["steps"]), "tokens": int(share * run["tokens"])}
            loss = run["valid"] + 1 - share
            tables["curves"].append(
                labels | {k: str(v) for k, v in point.items()} | {"valid loss": str(loss)}
            )
        for line in probe_lines(run["arm"], run["seed"], -0.1 if run["arm"] == "GFSA" else 0.0):
            kept = {name: str(line.get(name, "")) for name in ("probe", "layer", "values")}
            tables["probes"].append(labels | kept)
        if run["arm"] == "GFSA":
            for step in (0, run["steps"]):
                for layer in ("1", "2"):
                    moved = {"c0": "-0.1 -0.2" if step else "0 0", "c1": "1 1", "c2": "0 0"}
                    tables["coefficients"].append(
                        labels | {"step": str(step), "layer": layer} | moved
                    )
    write_tables(tables, folder / "pretraining")
    written = write(folder)
    assert {path.name for path in written} == {
        "pretraining.md",
        "pretraining.svg",
        "coefficients.svg",
        "pretraining.html",
    }
    page = (folder / "pretraining.md").read_text()
    assert "GFSA − plain (2 seeds)" in page
    # every pair differs by the same, so that there is no interval
    assert "| loss, repeated random tokens, second time | 1.000 | −0.100 |" in page
    assert "lens/pretraining.html" in page
    assert "GFSA (15M, seed 0)" in (folder / "lens/pretraining.html").read_text()
    before = {path: path.read_text() for path in written if path.suffix != ".html"}
    write(folder)
    assert {path: path.read_text() for path in before} == before


def test_speeds_are_those_of_runs_alone() -> None:
    rows = pd.DataFrame(
        [
            {"jobs": 1, "others": "mfu=0.2 tokens_per_second=2000000", "settings": "batch_size=32"},
            {"jobs": 5, "others": "tokens_per_second=7", "settings": "batch_size=32"},
            {"jobs": 1, "others": "tokens_per_second=5", "settings": "residual=bf16"},
        ]
    ).assign(
        recipe="pretrain",
        task="techdocs qwen3-15m",
        method="plain",
        options="",
        steps=100,
        seed=0,
        parameters=100,
        added=0,
        test=1.0,
    )
    assert speeds_of(rows) == {("15M", "plain", 32): 2e6}


def test_the_page_is_what_the_rows_give() -> None:
    page = (RESULTS / "pretraining.md").read_text(encoding="utf-8")
    study = read_study(RESULTS)
    for made in (to_markdown(blocks(study, read_speeds(RESULTS))).strip(), answer(study.family)):
        assert made in page, "run python benchmarks/pretraining_curves.py write results"
