"""The demo from beginning to end: train, summarise, draw, say."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

import gfsa
from gfsa.environment import commit, cpu_name
from gfsa.info import versions
from gfsa_experiments.tasks.digits.data import load_digits
from gfsa_experiments.tasks.digits.experiment import Settings, run_all, total_steps
from gfsa_experiments.tasks.digits.figures import draw
from gfsa_experiments.tasks.digits.model import DigitsViT
from gfsa_experiments.tasks.digits.report import table, write_numbers
from gfsa_experiments.tasks.digits.summary import Summary, closing, summarise


def run_demo(settings: Settings, out: Path, console: Console) -> list[Summary]:
    """Run the experiment of ``settings``, print what it gave, and write everything into ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    # the model is too small to share out: threads would spend their time waiting for one another
    torch.set_num_threads(1)
    start = time.perf_counter()
    with Progress(
        TextColumn("{task.description:<24}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
    ) as progress:
        task = progress.add_task("training", total=total_steps(settings))

        def on_step(variant: str, seed: int) -> None:
            where = f"{variant}, seed {seed + 1} of {settings.seeds}"
            progress.update(task, advance=1, description=where)

        # one seed is enough to look into; all of them are in the table
        models: dict[str, DigitsViT] = {}

        def on_end(variant: str, seed: int, model: DigitsViT) -> None:
            if seed == 0:
                models[variant] = model

        runs = run_all(settings, on_step, on_end)
        progress.update(task, description="done")
    seconds = time.perf_counter() - start
    summaries = summarise(runs)
    console.print(table(summaries, settings))
    for sentence in closing(summaries):
        console.print(sentence)
    environment = {
        **versions(),
        "commit": commit(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "seconds": round(seconds, 1),
    }
    write_numbers(out / "demo.json", runs, summaries, settings, environment)
    draw(runs, summaries, settings, out)
    _look_into(models, settings, out)
    console.print(
        f"{seconds:.0f} s. Figures (similarity, accuracy, response) and demo.json are in {out}/. "
        f"Open {out / 'lens.html'} to look into the trained models, layer by layer and head by head"
    )
    return summaries


def _look_into(models: dict[str, DigitsViT], settings: Settings, out: Path) -> None:
    """The page of :func:`gfsa.diagnose` on the models of the first seed."""
    images = load_digits(settings.held_out).held_out_images
    report = gfsa.diagnose(models, images, spectral_samples=len(images))
    report.data = f"the {settings.held_out} images of the digits, models of the first seed"
    report.to_html(out / "lens.html")
    report.to_json(out / "lens.json")
