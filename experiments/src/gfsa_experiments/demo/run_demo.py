"""The demo: train every variant under every seed, then print, write and draw the results."""

from __future__ import annotations

import csv
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import gfsa
from gfsa.environment import commit, cpu_name
from gfsa.info import versions
from gfsa.lens.measure import cosine_similarity
from gfsa.lens.trajectory import Trajectory
from gfsa_experiments.demo.comparison import DemoSettings
from gfsa_experiments.demo.figures import draw
from gfsa_experiments.demo.summary import DemoRun, findings, table_of, time_ratio
from gfsa_experiments.engine.run_log import COEFFICIENTS
from gfsa_experiments.runs.load_run import trained_task
from gfsa_experiments.runs.row import Row
from gfsa_experiments.runs.run import Run
from gfsa_experiments.runs.run_many import carry_out_all

_MODELS = {
    "stdlib": "decoder, bytes of Python's standard library",
    "digits": "ViT, scikit-learn's digits",
}


class Trained:
    """The demo's runs, and the models and coefficients over training of its first seed."""

    def __init__(self) -> None:
        self.runs: list[DemoRun] = []
        self.models: dict[str, Any] = {}
        self.trajectories: dict[str, Trajectory] = {}


def run_demo(settings: DemoSettings, out: Path, console: Console) -> list[DemoRun]:
    """Carry out the runs of ``settings``, print the results and write everything into ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with Progress(console=console) as progress:
        trained = train_all(settings, progress)
    runs = trained.runs
    console.print(shown_table(runs, settings))
    for sentence in findings(runs):
        console.print(sentence)
    report = gfsa.diagnose(
        trained.models, settings.inputs(), spectral_samples=settings.spectral_samples
    )
    report.data = f"the {settings.held_out} part of {settings.task}, models of the first seed"
    report.trajectories = trained.trajectories
    report.to_html(out / "lens.html")
    report.to_json(out / "lens.json")
    figures = report.figures
    for suffix in ("png", "svg"):
        draw(runs, out / f"difference.{suffix}")
        for name in ("similarity", "response"):
            figures[name].savefig(out / f"{name}.{suffix}", dpi=200)
    seconds = time.perf_counter() - start
    numbers = {
        "settings": asdict(settings),
        "environment": {
            **versions(),
            "commit": commit(),
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "seconds": round(seconds, 1),
        },
        "findings": findings(runs),
        "runs": [{"variant": run.row.method, **asdict(run)} for run in runs],
    }
    (out / "demo.json").write_text(json.dumps(numbers, indent=1) + "\n")
    console.print(
        f"{seconds:.0f} s. Figures (difference, similarity, response) and demo.json are in {out}/. "
        f"Open {out / 'lens.html'} to look into the trained models, layer by layer and head by head"
    )
    return runs


def train_all(settings: DemoSettings, progress: Progress) -> Trained:
    """All runs, several at a time, by seed and variant.

    They are started seed by seed, so that a busy machine slows all variants alike.
    """
    names = list(settings.variants())
    seeds = range(settings.first_seed, settings.first_seed + settings.seeds)
    found = Trained()
    with tempfile.TemporaryDirectory() as folder:
        planned = [
            (name, settings.run(name, seed, Path(folder))) for seed in seeds for name in names
        ]
        bar = progress.add_task(f"{len(planned)} training runs", total=len(planned))
        # a process of its own has one thread; without one, threads would wait for each other, as
        # the models are too small to be split
        torch.set_num_threads(1)
        for finished in carry_out_all([run for _, run in planned], settings.jobs):
            if finished.row is None or finished.error:
                raise RuntimeError(f"a run of the demo failed: {finished.error}")
            progress.advance(bar)
        for name, run in planned:
            _add(found, name, run, settings)
    return found


def _add(found: Trained, name: str, run: Run, settings: DemoSettings) -> None:
    """Read a finished run from its folder."""
    row = json.loads((run.folder / "row.json").read_text())
    model: Any = trained_task(run.folder, Path()).model
    found.runs.append(_measured(name, Row(**row), model, run.folder, settings))
    if run.config.seed == settings.first_seed:
        found.models[name] = model
        if (run.folder / COEFFICIENTS).exists():
            found.trajectories[name] = Trajectory.from_csv(run.folder / COEFFICIENTS)


def _measured(variant: str, row: Row, model: Any, folder: Path, settings: DemoSettings) -> DemoRun:
    if settings.held_out == "validation":
        assert row.valid is not None
        row = replace(row, test=row.valid)
    filters = gfsa.filters_of(model).values()
    with torch.no_grad():
        states = model.tokens(settings.inputs())
    return DemoRun(
        # variants differ in their rates, and are compared all the same
        row=replace(row, method=variant, options="", settings=""),
        similarity=[cosine_similarity(state.double()).mean().item() for state in states],
        coefficients=[graph_filter.coefficients().tolist() for graph_filter in filters],
        curve=_curve(folder, row.metric),
    )


def _curve(folder: Path, metric: str) -> list[tuple[int, float]]:
    with open(folder / "curve.csv", newline="") as file:
        return [
            (int(line["step"]), float(line[f"valid {metric}"])) for line in csv.DictReader(file)
        ]


def shown_table(runs: Sequence[DemoRun], settings: DemoSettings) -> Table:
    """A row for each variant."""
    metric = runs[0].row.metric.replace("_", " ")
    table = Table(
        title=(
            f"{_MODELS[settings.task]}: {settings.layers} layers, {runs[0].row.parameters:,} "
            f"parameters, {settings.extent}, {settings.seeds} seeds"
        ),
        title_justify="left",
    )
    table.add_column("attention", no_wrap=True)
    for heading in (
        f"{settings.held_out},\n{metric}",
        "paired\ndiff.",
        "numbers\nadded",
        "time\n× plain",
        "similarity\nfirst last",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for line in table_of(runs).lines:
        states = [run.similarity for run in runs if run.row.method == line.method]
        # after the first and the last layer
        depths = (1, -1)
        ratio = time_ratio(runs, line.method)
        table.add_row(
            line.method,
            f"{line.mean:.3f} ± {line.std or 0:.3f}",
            "–" if line.difference is None else f"{line.difference.mean:+.3f}",
            ", ".join(map(str, line.added)),
            "–" if ratio is None else f"{ratio:.2f}",
            " ".join(f"{fmean(state[at] for state in states):.2f}" for at in depths),
        )
    return table
