"""The page of the study of pretraining and its figures, written from files."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from gfsa_experiments.results.page_blocks import to_markdown
from gfsa_experiments.results.pretraining.collect import write_tables
from gfsa_experiments.results.pretraining.figure import draw
from gfsa_experiments.results.pretraining.page import detail_blocks, first_blocks
from gfsa_experiments.results.pretraining.speeds import read_speeds
from gfsa_experiments.results.pretraining.study import Study, read_study
from gfsa_experiments.results.pretraining.write import DETAILS, PAGE, opening, write
from gfsa_experiments.tasks.pretrain.recipe import PretrainConfig
from support.pretraining_runs import PARAMETERS, curve, probe_lines, runs, study_folder

RESULTS = Path(__file__).parents[2] / "results"


@pytest.fixture(autouse=True)
def _without_sketches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether methods fit models is tested with the plans; here it would take most of the time."""
    monkeypatch.setattr(PretrainConfig, "sketch", lambda config: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return study_folder(tmp_path)


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


def test_what_was_not_timed_is_said_beside_the_curves() -> None:
    """A line for each, so that no name runs into the curves, which fall from the left."""
    sizes, arms = ("15M", "46M", "110M"), ("plain", "degree 1", "GFSA")
    gfsa = runs(dict.fromkeys(sizes, (10,)), lambda x: -0.1, (0,))
    table = pd.concat([gfsa, gfsa[gfsa.arm == "GFSA"].assign(arm="degree 1", method="degree 1")])
    lines = []
    for size, parameters in PARAMETERS.items():
        for arm in arms:
            points = np.geomspace(parameters, 10 * parameters, 8)
            lines.append(curve(size, arm, 0, points, lambda t: 9 - math.log(t) / 3))
    none = pd.DataFrame()
    figure = draw(Study(table, pd.concat(lines), none, none, none, []), {}, None)
    by_time = figure.axes[1]
    (text,) = by_time.texts
    assert {f"{arm} at {size}" for arm in arms for size in sizes} <= set(
        text.get_text().splitlines()
    )
    figure.canvas.draw()
    drawn, panel = text.get_window_extent(), by_time.get_window_extent()
    assert panel.x0 + 0.5 * panel.width < drawn.x0
    assert drawn.x1 <= panel.x1
    assert panel.y0 <= drawn.y0


def test_the_fit_is_drawn_where_there_is_one() -> None:
    none = pd.DataFrame()
    for lengths, fitted in (((1, 3, 10), True), ((1, 3), False)):
        table = runs({"15M": lengths}, lambda x: -0.2 / x)
        study = Study(table, none_of_curves(), none, none, none, [])
        panel = draw(study, {}, None).axes[2]
        curves = [line for line in panel.lines if line.get_linestyle() == "-."]
        assert len(curves) == fitted
        assert ("fitted to the smallest size" in panel.get_title()) == fitted
        for line in curves:
            x, y = np.asarray(line.get_xdata()), np.asarray(line.get_ydata())
            assert (x[0], x[-1]) == pytest.approx((1, 10))
            assert y == pytest.approx(-0.2 / x)


def none_of_curves() -> pd.DataFrame:
    return curve("15M", "plain", 0, (1e7,), lambda t: 1.0)[:0]


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
        "pretraining-details.md",
        "pretraining.svg",
        "coefficients.svg",
        "pretraining.html",
    }
    page = (folder / "pretraining-details.md").read_text()
    assert "GFSA − plain (2 seeds)" in page
    # every pair differs by the same, so that there is no interval
    assert "| loss, repeated random tokens, second time | 1.000 | −0.100 |" in page
    assert "lens/pretraining.html" in page
    assert "GFSA (15M, seed 0)" in (folder / "lens/pretraining.html").read_text()
    before = {path: path.read_text() for path in written if path.suffix != ".html"}
    write(folder)
    assert {path: path.read_text() for path in before} == before


def test_the_page_is_what_the_rows_give() -> None:
    study = read_study(RESULTS)
    parts = {
        PAGE: (opening(study), to_markdown(first_blocks(study)).strip()),
        DETAILS: (to_markdown(detail_blocks(study, read_speeds(RESULTS))).strip(),),
    }
    for name, made in parts.items():
        page = (RESULTS / name).read_text(encoding="utf-8")
        for part in made:
            assert part in page, "run python benchmarks/pretraining_curves.py write results"
