"""Write what the study shows: the page's generated part, its figures, a lens page."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from gfsa.lens.report import LensReport
from gfsa_experiments.results.page_blocks import Text, with_part, write_pages
from gfsa_experiments.results.pretraining.answer import answer
from gfsa_experiments.results.pretraining.arms import by_size
from gfsa_experiments.results.pretraining.coefficients import draw_coefficients, trajectories
from gfsa_experiments.results.pretraining.figure import draw, save
from gfsa_experiments.results.pretraining.limits import limit_of_plain
from gfsa_experiments.results.pretraining.page import blocks
from gfsa_experiments.results.pretraining.speeds import read_speeds
from gfsa_experiments.results.pretraining.study import Study, read_study

PAGE = "pretraining.md"
FIGURE = "pretraining.svg"
MARKS = ("<!-- study of pretraining: begin -->", "<!-- study of pretraining: end -->")
ANSWER = ("<!-- answer of pretraining: begin -->", "<!-- answer of pretraining: end -->")


def opening(study: Study) -> str:
    """The page's first paragraph: what is confirmed, and against which plain model."""
    return " ".join(filter(None, (answer(study.family), limit_of_plain(study))))


def write(results: Path) -> list[Path]:
    """Write everything that the results allow; return what was written."""
    study, speeds = read_study(results), read_speeds(results)
    path = results / PAGE
    page = "\n".join(["# Pretraining", "", *ANSWER, "", *MARKS, ""])
    page = path.read_text(encoding="utf-8") if path.exists() else page
    page = with_part(page, path, [Text(opening(study))], ANSWER)
    page = with_part(page, path, blocks(study, speeds), MARKS)
    tuning = results / "tuning" / "pretrain-curves.csv"
    save(draw(study, speeds, pd.read_csv(tuning) if tuning.exists() else None), results / FIGURE)
    written = [path, results / FIGURE]
    if len(study.coefficients):
        kept = study.runs[study.runs.arm.isin(study.coefficients.arm.unique())]
        drawn = draw_coefficients(study.coefficients, study.runs, by_size(kept)[0])
        save(drawn, results / "pretraining" / "coefficients.svg")
        report = LensReport({}, data="techdocs")
        report.trajectories = trajectories(study.coefficients, study.runs)
        (results / "lens").mkdir(exist_ok=True)
        report.to_html(results / "lens" / "pretraining.html")
        written += [results / "pretraining/coefficients.svg", results / "lens/pretraining.html"]
    write_pages({path: page})
    return written
