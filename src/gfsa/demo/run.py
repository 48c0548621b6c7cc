"""The demo from beginning to end: train, summarise, draw, say."""

from __future__ import annotations

import os
import time
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from gfsa.bench.environment import commit, cpu_name
from gfsa.demo.experiment import Settings, run_all, total_steps
from gfsa.demo.figures import draw
from gfsa.demo.report import table, write_numbers
from gfsa.demo.summary import Summary, closing, summarise
from gfsa.info import versions


def run_demo(settings: Settings, out: Path, console: Console) -> list[Summary]:
    """Run the experiment of ``settings``, print what it gave, and write everything into ``out``."""
    out.mkdir(parents=True, exist_ok=True)
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

        runs = run_all(settings, on_step)
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
    console.print(
        f"{seconds:.0f} s. Figures (similarity, accuracy, response) and demo.json are in {out}/"
    )
    return summaries
