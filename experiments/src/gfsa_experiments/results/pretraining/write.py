"""Write what the study shows: the pages' generated parts, their figures, a lens page."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from gfsa.lens.report import LensReport
from gfsa_experiments.results.page_blocks import Text, with_part, write_pages
from gfsa_experiments.results.pretraining.answer import answers
from gfsa_experiments.results.pretraining.arms import by_size
from gfsa_experiments.results.pretraining.coefficients import draw_coefficients, trajectories
from gfsa_experiments.results.pretraining.figure import draw, save
from gfsa_experiments.results.pretraining.fit_words import vanishing
from gfsa_experiments.results.pretraining.page import detail_blocks, first_blocks
from gfsa_experiments.results.pretraining.passing import passings, with_tuned_plain
from gfsa_experiments.results.pretraining.speeds import read_speeds
from gfsa_experiments.results.pretraining.study import FAMILIES, Study, read_study

PAGE = "pretraining.md"
DETAILS = "pretraining-details.md"
FIGURE = "pretraining.svg"
TUNED_SIZE = "-15m"
MARKS = ("<!-- study of pretraining: begin -->", "<!-- study of pretraining: end -->")
ANSWER = ("<!-- answer of pretraining: begin -->", "<!-- answer of pretraining: end -->")


def opening(study: Study) -> str:
    """The page's first paragraphs: what is confirmed, and whether it lasts."""
    tuned = with_tuned_plain(study.runs, passings(study.curves, study.runs))
    return "\n\n".join(filter(None, [answers(study.families, FAMILIES), vanishing(tuned)]))


def _rows_of_tuning(results: Path) -> pd.DataFrame | None:
    """The rows of the size that was tuned, on our own corpus."""
    file = results / "tuning" / "pretrain.csv"
    if not file.exists():
        return None
    rows = pd.read_csv(file, keep_default_na=False, na_values={"valid": [""]})
    return rows[rows.task.str.endswith(TUNED_SIZE)]


def write(results: Path) -> list[Path]:
    """Write everything that the results allow; return what was written."""
    study, speeds = read_study(results), read_speeds(results)
    path, details = results / PAGE, results / DETAILS
    page = _text_of(path, ["# Pretraining", "", *ANSWER, "", *MARKS, ""])
    page = with_part(page, path, [Text(opening(study))], ANSWER)
    page = with_part(page, path, first_blocks(study), MARKS)
    more = _text_of(details, ["# Pretraining: details", "", *MARKS, ""])
    more = with_part(more, details, detail_blocks(study, speeds), MARKS)
    save(draw(study, speeds, _rows_of_tuning(results)), results / FIGURE)
    written = [path, details, results / FIGURE]
    if len(study.coefficients):
        kept = study.runs[study.runs.arm.isin(study.coefficients.arm.unique())]
        drawn = draw_coefficients(study.coefficients, study.runs, by_size(kept)[0])
        save(drawn, results / "pretraining" / "coefficients.svg")
        report = LensReport({}, data="techdocs")
        report.trajectories = trajectories(study.coefficients, study.runs)
        (results / "lens").mkdir(exist_ok=True)
        report.to_html(results / "lens" / "pretraining.html")
        written += [results / "pretraining/coefficients.svg", results / "lens/pretraining.html"]
    write_pages({path: page, details: more})
    return written


def _text_of(path: Path, new: list[str]) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else "\n".join(new)
